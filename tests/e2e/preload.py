"""What a run imports, so that forked processes need not; nothing is computed here."""

import tests.e2e.small  # noqa: F401
import zoo.build  # noqa: F401
import zoo.compose  # noqa: F401
import zoo.instantiate  # noqa: F401
import zoo.measure.provenance  # noqa: F401
import zoo.train.loop  # noqa: F401
import zoo.train.run  # noqa: F401
import zoo.train.session  # noqa: F401
