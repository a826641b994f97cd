"""What a run imports, so that forked processes need not; nothing is computed here."""

import tests.e2e.small  # noqa: F401
import zoo.build
import zoo.compose
import zoo.instantiate
import zoo.measure.provenance
import zoo.train.loop
import zoo.train.run
import zoo.train.session  # noqa: F401
