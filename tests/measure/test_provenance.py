import json
import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers

from zoo.measure import provenance
from zoo.measure.provenance import meta


def git(folder, *arguments):
    # Nothing of the developer's own git configuration (signing, hooks) reaches these commits.
    names = {
        f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    environment = {**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, env=environment)


def test_versions_and_machine_are_the_real_ones():
    found = meta()
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["versions"]["transformers"] == transformers.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["machine"]["cores"] <= (os.cpu_count() or 1)
    assert found["machine"]["gpu"] is None
    json.dumps(found)


def test_the_machines_name_is_not_in_the_record():
    found = meta()
    found.pop("argv")
    assert platform.node() not in json.dumps(found) or len(platform.node()) < 4


def test_commit_and_uncommitted_changes(tmp_path: Path):
    assert provenance._commit(tmp_path) == (None, None)  # no checkout
    git(tmp_path, "init", "-q")
    assert provenance._commit(tmp_path) == (None, None)  # no commit yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "a")
    commit, dirty = provenance._commit(tmp_path)
    assert commit is not None and len(commit) == 40 and dirty is False
    (tmp_path / "b").write_text("untracked files do not count")
    assert provenance._commit(tmp_path)[1] is False
    (tmp_path / "a").write_text("2")
    assert provenance._commit(tmp_path) == (commit, True)


def test_a_git_that_hangs_or_is_absent_is_no_error(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()

    def hang(*_, **keywords):
        raise subprocess.TimeoutExpired("git", keywords["timeout"])

    monkeypatch.setattr(provenance.subprocess, "run", hang)
    assert provenance._commit(tmp_path) == (None, None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance._commit(tmp_path) == (None, None)
