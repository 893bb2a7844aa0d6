"""Tests of `apply`: diffs on a checkout of JAX, and on an unpacked release.

Most work on a small tree with a series of its own, made here.
"""
import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import unidiff

from jax_cond_patch import __main__ as main
from jax_cond_patch import checkout
from jax_cond_patch.compat import releases

ROOT = pathlib.Path(__file__).resolve().parent.parent
FORMAT = runpy.run_path(str(ROOT / "tests" / "export_patches.py"))["FORMAT"]

BASE = {
    "jax/version.py": '_version = "0.1.0"\n',
    "jax/_src/a.py": "".join(f"line {i}\n" for i in range(30)),
    "jax/_src/b.py": "b = 1\n",
    "jax/_src/c.py": "c = 1\n",
    "tests/BUILD": "tests\n",
}
FIRST = {"jax/_src/a.py": BASE["jax/_src/a.py"].replace("line 3\n", "three\n"),
         "tests/a_test.py": "test\n"}
SECOND = {"jax/_src/a.py": FIRST["jax/_src/a.py"].replace("line 25\n", ""),
          "jax/_src/new.py": "new = 1\n",
          "tests/a_test.py": "test\nmore\n"}
PATCHED = {**BASE, **FIRST, **SECOND}


def git(folder, *args):
  return subprocess.run(
      ["git", "-c", "user.name=u", "-c", "user.email=u@u", *args], cwd=folder,
      check=True, capture_output=True, text=True).stdout.strip()


def write(folder, files):
  for name, text in files.items():
    path = pathlib.Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read(folder):
  """The files of a folder, by name."""
  folder = pathlib.Path(folder)
  return {str(path.relative_to(folder)): path.read_text()
          for path in folder.rglob("*")
          if path.is_file() and ".git" not in path.parts}


def released(files):
  return {name: text for name, text in files.items() if name.startswith("jax/")}


def commit(folder, message):
  git(folder, "add", ".")
  git(folder, "commit", "--quiet", "-m", message)


class CheckoutTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    checkout.all_series.cache_clear()
    self.addCleanup(checkout.all_series.cache_clear)
    self.tmp = pathlib.Path(
        self.enter(tempfile.TemporaryDirectory())).resolve()
    self.repo = self.tmp / "repo"
    write(self.repo, BASE)
    git(self.tmp, "init", "--quiet", str(self.repo))
    commit(self.repo, "base")
    patches = self.tmp / "patches"
    clone = self.tmp / "clone"
    git(self.tmp, "clone", "--quiet", str(self.repo), str(clone))
    write(clone, FIRST)
    commit(clone, "First\n\nWhy.")
    write(clone, SECOND)
    commit(clone, "Second\n\nWhy not.\n\nAt length.")
    git(clone, "format-patch", *FORMAT, "-o", str(patches / "0.1.0"), "-2")
    write(patches, {"manifest.json": json.dumps([
        dict(release="0.1.0", tag="jax-v0.1.0", commit="", series="0.1.0"),
        dict(release="0.1.1", tag="jax-v0.1.1", commit="", series="0.1.0")])})
    self.enter(mock.patch.object(checkout, "patches_dir", lambda: patches))

  def enter(self, context):
    value = context.__enter__()
    self.addCleanup(context.__exit__, None, None, None)
    return value

  def unpacked(self, parent=None):
    folder = (parent or self.tmp) / "site-packages"
    write(folder, released(BASE))
    return folder

  def assertRefused(self, folder, message, **kwargs):
    before = read(folder)
    with self.assertRaisesRegex(checkout.CheckoutError, message):
      checkout.apply(folder, **kwargs)
    self.assertEqual(read(folder), before)

  # A git checkout.

  def test_commits(self):
    base = git(self.repo, "rev-parse", "HEAD")
    said = checkout.apply(self.repo)
    self.assertRegex(said, "2 diffs for JAX 0.1.0, 0.1.1 were put into it, as "
                     "commits")
    self.assertEqual(read(self.repo), PATCHED)
    self.assertEqual(git(self.repo, "status", "--porcelain"), "")
    self.assertEqual(
        git(self.repo, "log", "--format=%s|%b", f"{base}..").split("\n\n"),
        ["Second|Why not.", "At length.", "First|Why."])

  def test_the_same_commits_every_time(self):
    base = git(self.repo, "rev-parse", "HEAD")
    checkout.apply(self.repo)
    first = git(self.repo, "rev-parse", "HEAD")
    git(self.repo, "reset", "--quiet", "--hard", base)
    checkout.apply(self.repo)
    self.assertEqual(git(self.repo, "rev-parse", "HEAD"), first)

  def test_works_without_a_name_for_git(self):
    with mock.patch.dict(
        os.environ, GIT_CONFIG_NOSYSTEM="1", GIT_CONFIG_GLOBAL=os.devnull):
      checkout.apply(self.repo)
    self.assertEqual(read(self.repo), PATCHED)

  def test_detached_head(self):
    git(self.repo, "checkout", "--quiet", "--detach")
    checkout.apply(self.repo)
    self.assertEqual(read(self.repo), PATCHED)

  def test_already_applied(self):
    checkout.apply(self.repo)
    head = git(self.repo, "rev-parse", "HEAD")
    for kwargs in (dict(), dict(check=True), dict(commit=False)):
      self.assertIn("in already", checkout.apply(self.repo, **kwargs))
    self.assertEqual(git(self.repo, "rev-parse", "HEAD"), head)

  @parameterized.parameters(True, False)
  def test_check_changes_nothing(self, commit_):
    head = git(self.repo, "rev-parse", "HEAD")
    said = checkout.apply(self.repo, check=True, commit=commit_)
    self.assertIn("can be put into it", said)
    self.assertEqual(read(self.repo), BASE)
    self.assertEqual(git(self.repo, "rev-parse", "HEAD"), head)
    self.assertEqual(git(self.repo, "status", "--porcelain"), "")

  def test_no_commit(self):
    head = git(self.repo, "rev-parse", "HEAD")
    checkout.apply(self.repo, commit=False)
    self.assertEqual(read(self.repo), PATCHED)
    self.assertEqual(git(self.repo, "rev-parse", "HEAD"), head)
    self.assertIn("in already", checkout.apply(self.repo, commit=False))
    # They are not in as commits, which is what this asks for.
    self.assertRefused(self.repo, "not committed: jax/_src/a.py")
    checkout.apply(self.repo, commit=False, reverse=True)
    self.assertEqual(read(self.repo), BASE)
    self.assertEqual(git(self.repo, "status", "--porcelain"), "")

  def test_reverse(self):
    base = git(self.repo, "rev-parse", "HEAD^{tree}")
    self.assertIn("are not in", checkout.apply(self.repo, reverse=True))
    checkout.apply(self.repo)
    write(self.repo, {"jax/_src/c.py": "c = 2\n"})
    commit(self.repo, "more")
    checkout.apply(self.repo, reverse=True)
    self.assertEqual(read(self.repo), {**BASE, "jax/_src/c.py": "c = 2\n"})
    self.assertEqual(
        git(self.repo, "log", "-1", "--format=%s"), "Revert: First")
    self.assertEqual(git(self.repo, "rev-parse", "HEAD~5^{tree}"), base)

  @parameterized.parameters("jax/_src/a.py", "jax/_src/c.py")
  def test_changes_that_are_not_committed(self, changed):
    write(self.repo, {changed: "changed = 1\n"})
    for kwargs in (dict(), dict(check=True), dict(commit=False)):
      self.assertRefused(self.repo, f"not committed: {changed}.*git stash",
                         **kwargs)

  def test_a_new_file_is_there_already(self):
    write(self.repo, {"jax/_src/new.py": "mine = 1\n"})
    self.assertRefused(self.repo, "jax/_src/new.py differs")

  def test_changed_release(self):
    write(self.repo, {"jax/_src/a.py": "other\n"})
    commit(self.repo, "other")
    self.assertRefused(
        self.repo, "is JAX 0.1.0, but not the released one: jax/_src/a.py "
        "differs.*Check out jax-v0.1.0")

  def test_half_applied(self):
    write(self.repo, FIRST)
    commit(self.repo, "by hand")
    self.assertRefused(self.repo, "differ")

  def test_unknown_release(self):
    write(self.repo, {"jax/version.py": '_version = "0.2.0"\n',
                      "jax/_src/a.py": "other\n"})
    commit(self.repo, "other")
    self.assertRefused(
        self.repo, "it is JAX 0.2.0, and there are diffs for 0.1.0, 0.1.1. "
        "Check out")

  def test_commit_that_is_no_release(self):
    """The files that are touched count, not what a tree says it is."""
    write(self.repo, {"jax/version.py": '_version = "0.2.0"\n',
                      "jax/_src/c.py": "c = 2\n"})
    commit(self.repo, "later")
    checkout.apply(self.repo)
    self.assertEqual(read(self.repo)["jax/_src/new.py"], "new = 1\n")

  def test_nothing_is_left_of_a_failure(self):
    head = git(self.repo, "rev-parse", "HEAD")
    original = checkout._git_apply
    calls = []
    def failing(*args, **kwargs):
      calls.append(1)
      if len(calls) == 2:
        raise checkout.CheckoutError("no space")
      original(*args, **kwargs)
    with mock.patch.object(checkout, "_git_apply", failing):
      self.assertRefused(self.repo, "no space")
    self.assertEqual(git(self.repo, "rev-parse", "HEAD"), head)
    self.assertEqual(git(self.repo, "status", "--porcelain"), "")

  # An unpacked release.

  @parameterized.parameters(False, True)
  def test_unpacked(self, in_a_repository):
    folder = self.unpacked(self.repo if in_a_repository else None)
    self.assertIn("can be put", checkout.apply(folder, check=True))
    self.assertEqual(read(folder), released(BASE))
    checkout.apply(folder)
    self.assertEqual(read(folder), released(PATCHED))
    self.assertIn("in already", checkout.apply(folder))
    checkout.apply(folder, reverse=True)
    self.assertEqual(read(folder), released(BASE))

  def test_unpacked_and_linked_elsewhere(self):
    """Installers link files to their caches."""
    folder = self.unpacked()
    os.link(folder / "jax/_src/a.py", self.tmp / "cached")
    checkout.apply(folder)
    self.assertEqual((self.tmp / "cached").read_text(), BASE["jax/_src/a.py"])

  def test_unpacked_and_changed(self):
    folder = self.unpacked()
    write(folder, {"jax/_src/a.py": "other\n"})
    self.assertRefused(folder, "jax/_src/a.py differs.*install the release")

  def test_nothing_is_left_of_a_failure_unpacked(self):
    folder = self.unpacked()
    original = checkout._write
    def failing(path, content):
      if path == folder / "jax/_src/new.py" and content:
        raise OSError("no space")
      original(path, content)
    with mock.patch.object(checkout, "_write", failing):
      self.assertRefused(folder, "no space")

  # What it is asked for.

  def test_no_folder(self):
    with self.assertRaisesRegex(checkout.CheckoutError, "There is no folder"):
      checkout.apply(self.tmp / "nowhere")

  def test_no_jax(self):
    self.assertRefused(self.tmp / "patches", "does not hold JAX")

  def test_no_git(self):
    with mock.patch.dict(os.environ, PATH=str(self.tmp)):
      self.assertRefused(self.repo, "no git on this machine")

  def test_command(self):
    self.assertEqual(main.main(["apply", str(self.repo), "--check"]), 0)
    self.assertEqual(main.main(["apply", str(self.repo), "--no-commit"]), 0)
    self.assertEqual(main.main(["apply", str(self.repo)]), 1)
    self.assertEqual(
        main.main(["apply", str(self.repo), "--no-commit", "--reverse"]), 0)
    self.assertEqual(main.main(["apply", str(self.repo)]), 0)
    self.assertEqual(main.main(["apply", str(self.tmp)]), 1)
    self.assertEqual(main.main(["list"]), 0)


class PatchesTest(parameterized.TestCase):
  """The diffs themselves."""

  def test_commands_import_no_jax(self):
    with tempfile.TemporaryDirectory() as tmp:
      # Nor what comes with it.
      write(tmp, {f"{package}/__init__.py": "raise ImportError('imported')\n"
                  for package in ("jax", "jaxlib", "numpy")})
      for command in (["list"], ["apply", tmp]):
        done = subprocess.run(
            [sys.executable, "-m", "jax_cond_patch", *command],
            capture_output=True, text=True, check=False, env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([tmp, *filter(None, sys.path)])})
        self.assertNotIn("imported", done.stderr)
        self.assertEqual(done.returncode, 0 if command == ["list"] else 1)
    self.assertIn("does not hold JAX", done.stderr)

  def test_manifest(self):
    """It lists supported releases in order, and each has a series."""
    known = [release.jax for release in releases.RELEASES]
    listed = [release.release for release in checkout.manifest()]
    self.assertEqual(listed, [v for v in known if v in listed])
    self.assertEqual(listed[-1], known[-1])
    for release in checkout.manifest():
      self.assertEqual(release.tag, f"jax-v{release.release}")
      self.assertRegex(release.commit or "0" * 40, "^[0-9a-f]{40}$")
      self.assertEqual(release.commit is None, release.build_files is not None)

  def test_no_unused_file(self):
    used = {"manifest.json"}
    for series in checkout.all_series():
      self.assertEqual(series.name, series.releases[0].release)
      self.assertNotEmpty(series.patches)
      used.update(f"{series.name}/{p.path.name}" for p in series.patches)
    root = checkout.patches_dir()
    found = {str(path.relative_to(root)) for path in root.rglob("*")
             if path.is_file() and "__pycache__" not in path.parts}
    self.assertEqual(found, used)

  def test_headers(self):
    for series in checkout.all_series():
      base = series.releases[0]
      for n, patch in enumerate(series.patches, 1):
        with self.subTest(series=series.name, patch=patch.path.name):
          self.assertStartsWith(patch.path.name, f"{n:04}-")
          lines = patch.content.decode().split("\n")
          self.assertEqual(
              lines[0], f"From {'0' * 40} Mon Sep 17 00:00:00 2001")
          message = checkout.header(patch.content).message
          subject, _, *why = message.splitlines()
          self.assertRegex(subject, "^[A-Z].*[^.]$")
          self.assertGreater(len(why), 10)
          for line in (subject, *why):
            if not line.startswith(("Base: ", "Upstream-Issue: ")):
              self.assertLessEqual(len(line), 72, line)
          self.assertIn(
              "Upstream-Issue: https://github.com/jax-ml/jax/issues/28594", why)
          self.assertIn(
              f"Base: {base.tag}, {base.commit}" if base.commit else
              f"Base: JAX {base.release} as released", why)

  def test_diffs(self):
    """Each can be read, changes what its header says, and brings tests."""
    for series in checkout.all_series():
      names = set()
      for patch in series.patches:
        with self.subTest(series=series.name, patch=patch.path.name):
          files = unidiff.PatchSet(patch.content.decode())
          self.assertEqual([f.path for f in files], list(patch.ids))
          self.assertIn("tests/platform_dependent_test.py", patch.ids)
          for file in files:
            for line in (line for hunk in file for line in hunk):
              if line.is_added:
                self.assertNotRegex(line.value, r"[ \t]+$", file.path)
          names.update(patch.ids)
      self.assertIn("tests/BUILD", names)

  def test_the_commits_follow_each_other(self):
    for series in checkout.all_series():
      ids = {}
      for patch in series.patches:
        for path, (before, after) in patch.ids.items():
          self.assertEqual(before, ids.get(path, before), path)
          ids[path] = after

  def test_installed_release(self):
    """The diffs fit the package that is installed, and leave nothing."""
    found = releases.find(releases.installed() or "")
    listed = [release.release for release in checkout.manifest()]
    if found is None or found.jax not in listed:
      self.skipTest(f"There are no diffs for {found}.")
    import jax
    package = pathlib.Path(jax.__file__).parent
    with tempfile.TemporaryDirectory() as tmp:
      folder = pathlib.Path(tmp)
      series = next(s for s in checkout.all_series()
                    if found.jax in [r.release for r in s.releases])
      for name in ("jax/version.py", *series.ids):
        source = package.parent / name
        if source.exists():
          (folder / name).parent.mkdir(parents=True, exist_ok=True)
          shutil.copy(source, folder / name)
      before = read(folder)
      if "jax/_src/interpreters/platforms.py" in before:
        checkout.apply(folder, reverse=True)
        before = read(folder)
      checkout.apply(folder)
      for name, text in read(folder).items():
        compile(text, name, "exec")
      self.assertIn("jax/_src/interpreters/platforms.py", read(folder))
      checkout.apply(folder, reverse=True)
      self.assertEqual(read(folder), before)


if __name__ == "__main__":
  absltest.main()
