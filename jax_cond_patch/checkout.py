"""Puts the change into the source of JAX, as diffs that git applies.

`patches` holds a series of diffs for each base: the releases of JAX in which
the files that a series touches are the same. A base is told by these files
alone, by the ids that git gives to their contents, which the diffs hold too. So
a diff is put into exactly what it was made for, or not at all.

Nothing here imports JAX.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import enum
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import tempfile

from jax_cond_patch.errors import JaxCondPatchError

_PACKAGE = pathlib.Path(__file__).resolve().parent
# The id of what is not there.
_ABSENT = "0" * 40


class CheckoutError(JaxCondPatchError):
  """A tree is not as was asked; it is as it was before."""


def patches_dir() -> pathlib.Path:
  """The folder of the diffs: in the package if that is installed."""
  installed = _PACKAGE / "patches"
  return installed if installed.is_dir() else _PACKAGE.parent / "patches"


@dataclasses.dataclass(frozen=True)
class Release:
  """A release of JAX in the manifest.

  Attributes:
    release: its version.
    tag: its tag in JAX's repository.
    commit: the commit of the tag, None where the series was made from the
      package that was released.
    series: the name of its series.
    build_files: in that case, the tag that the build files are of.
  """
  release: str
  tag: str
  commit: str | None
  series: str
  build_files: str | None = None


def manifest() -> tuple[Release, ...]:
  """Lists the releases that there are diffs for."""
  text = (patches_dir() / "manifest.json").read_text(encoding="utf-8")
  return tuple(Release(**entry) for entry in json.loads(text))


@dataclasses.dataclass(frozen=True)
class Patch:
  """One diff, a commit in the form of `git format-patch`."""
  path: pathlib.Path

  @functools.cached_property
  def content(self) -> bytes:
    return self.path.read_bytes()

  @functools.cached_property
  def ids(self) -> dict[str, tuple[str, str]]:
    """The ids of the files that it touches, before and after it."""
    found = re.findall(
        rb"^diff --git a/(\S+) b/\S+\n(?:(?:new|deleted) file mode \d+\n)?"
        rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40})", self.content, re.MULTILINE)
    return {path.decode(): (before.decode(), after.decode())
            for path, before, after in found}


@dataclasses.dataclass(frozen=True)
class Series:
  """The diffs for one base.

  Attributes:
    name: its name, that of its first release.
    releases: the releases that it is for.
  """
  name: str
  releases: tuple[Release, ...]

  @functools.cached_property
  def patches(self) -> tuple[Patch, ...]:
    paths = sorted((patches_dir() / self.name).glob("*.patch"))
    return tuple(map(Patch, paths))

  @functools.cached_property
  def ids(self) -> dict[str, tuple[str, str]]:
    """The ids of the files that it touches, before and after all of it."""
    ids: dict[str, tuple[str, str]] = {}
    for patch in self.patches:
      for path, (before, after) in patch.ids.items():
        ids[path] = (ids.get(path, (before, after))[0], after)
    return ids


@functools.lru_cache(maxsize=None)
def all_series() -> tuple[Series, ...]:
  """Lists the series, the oldest releases first."""
  by_name: dict[str, list[Release]] = {}
  for release in manifest():
    by_name.setdefault(release.series, []).append(release)
  return tuple(Series(name, tuple(rs)) for name, rs in by_name.items())


def supported() -> str:
  return ", ".join(release.release for release in manifest())


class State(enum.Enum):
  UNPATCHED = "unpatched"
  PATCHED = "patched"


def _git(folder: pathlib.Path, *args: str, input: bytes | None = None,
         env: Mapping[str, str] | None = None) -> str:
  """Runs git in a folder, and returns what it prints."""
  env = {**os.environ, "LC_ALL": "C",
         # Above the folder, git shall not look for a repository.
         "GIT_CEILING_DIRECTORIES": str(folder.parent), **(env or {})}
  for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_PREFIX"):
    env.pop(name, None)
  try:
    done = subprocess.run(["git", *args], cwd=folder, input=input, env=env,
                          capture_output=True, check=False)
  except FileNotFoundError:
    raise CheckoutError(
        "There is no git on this machine; it applies the diffs. Install it. "
        "See docs/pages/errors.md#apply-git.") from None
  if done.returncode:
    raise CheckoutError(
        f"git {args[0]} failed, and everything is as it was: "
        f"{done.stderr.decode(errors='replace').strip()} "
        "See docs/pages/errors.md#apply-git.")
  return done.stdout.decode().rstrip("\n")


def _git_apply(folder: pathlib.Path, patch: Patch, reverse: bool,
               *options: str, env: Mapping[str, str] | None = None) -> None:
  if reverse:
    options = ("--reverse", *options)
  _git(folder, "apply", "--whitespace=nowarn", *options, "-",
       input=patch.content, env=env)


class Tree:
  """A folder with the source of JAX: a git checkout, or an unpacked release."""

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path).resolve()
    if not self.path.is_dir():
      raise CheckoutError(
          f"There is no folder {self.path}. Give the root of a checkout of "
          "JAX. See docs/pages/errors.md#apply-tree.")
    if not (self.path / "jax" / "_src").is_dir():
      raise CheckoutError(
          f"{self.path} does not hold JAX: it has no folder jax/_src. Give the "
          "root of a git checkout of JAX, or the folder of an unpacked release "
          "that its folder jax is in, such as site-packages. See "
          "docs/pages/errors.md#apply-tree.")
    # An unpacked release may stand in another project's repository.
    self.is_checkout = (self.path / ".git").exists()

  def git(self, *args: str, **kwargs) -> str:
    """Runs git in the tree, and returns what it prints."""
    return _git(self.path, *args, **kwargs)

  @functools.cached_property
  def version(self) -> str | None:
    """The version that the tree says that it is."""
    try:
      text = (self.path / "jax" / "version.py").read_text(encoding="utf-8")
    except OSError:
      return None
    match = re.search(r'^_version = "([^"]+)"', text, re.MULTILINE)
    return match and match[1]

  def touched(self, series: Series) -> dict[str, tuple[str, str]]:
    """As `Series.ids`, of the files that there can be in such a tree."""
    return {path: ids for path, ids in series.ids.items()
            if self.is_checkout or _is_released(path)}

  @functools.lru_cache(maxsize=None)
  def _id(self, path: str) -> str:
    if not (self.path / path).is_file():
      return _ABSENT
    if self.is_checkout:  # git may change line ends when it checks files out.
      return self.git("hash-object", "--", path)
    content = (self.path / path).read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

  def find(self) -> tuple[Series, State]:
    """Finds the series for this tree, and whether it is in."""
    closest: tuple[list[str], Series] | None = None
    for series in all_series():
      touched = self.touched(series)
      for which, state in enumerate(State):
        differ = [path for path, ids in touched.items()
                  if self._id(path) != ids[which]]
        if not differ:
          return series, state
        is_version = self.version in [r.release for r in series.releases]
        if is_version and (closest is None or len(differ) < len(closest[0])):
          closest = differ, series
    found_version = f"JAX {self.version or 'of an unknown version'}"
    if closest is None:
      raise CheckoutError(
          f"There are no diffs for what is in {self.path}: it is "
          f"{found_version}, and there are diffs for {supported()}. Check out "
          "the tag of one of these. See docs/pages/errors.md#apply-tree.")
    differ, series = closest
    tag = next(r for r in series.releases if r.release == self.version).tag
    raise CheckoutError(
        f"{self.path} is {found_version}, but not the released one: "
        f"{', '.join(differ)} {'differs' if len(differ) == 1 else 'differ'}. "
        f"The diffs fit the files of the release exactly. Check out {tag}, or "
        "install the release again; then rebase your changes on it. See "
        "docs/pages/errors.md#apply-tree.")

  def check_clean(self, but: Sequence[str] = ()) -> None:
    """Raises if files have changed since the last commit, but for some."""
    if not self.is_checkout:
      return
    changed = self.git("status", "--porcelain", "--untracked-files=no")
    paths = [line[3:] for line in changed.splitlines() if line[3:] not in but]
    if paths:
      more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
      raise CheckoutError(
          f"{self.path} has changes that are not committed: "
          f"{', '.join(paths[:5])}{more}. Commit them, or put them away with "
          "`git stash`. See docs/pages/errors.md#apply-changes.")

  def change(self, series: Series, reverse: bool, commit: bool) -> None:
    """Puts a series in, or takes it out: all of it, or nothing.

    Args:
      series: the series.
      reverse: whether to take it out.
      commit: whether to make commits, in a checkout. If not, only the files
        change.
    """
    if self.is_checkout and commit:
      self._commit(series, reverse)
    else:
      self._change_files(series, reverse)

  def _commit(self, series: Series, reverse: bool) -> None:
    # The commits are made beside the work tree, which takes them as a whole.
    with tempfile.TemporaryDirectory() as tmp:
      index = {"GIT_INDEX_FILE": os.path.join(tmp, "index")}
      parent = self.git("rev-parse", "HEAD")
      self.git("read-tree", parent, env=index)
      for patch in series.patches[::-1 if reverse else 1]:
        _git_apply(self.path, patch, reverse, "--cached", env=index)
        mail = header(patch.content)
        message = f"Revert: {mail.message}" if reverse else mail.message
        tree = self.git("write-tree", "--missing-ok", env=index)
        parent = self.git("commit-tree", tree, "-p", parent,
                          input=message.encode(), env=mail.author)
    self.git("merge", "--ff-only", "--quiet", parent)

  def _change_files(self, series: Series, reverse: bool) -> None:
    # The files are made beside the others, and put in their place at the end.
    touched = self.touched(series)
    before = {path: _read(self.path / path) for path in touched}
    with tempfile.TemporaryDirectory() as tmp:
      folder = pathlib.Path(tmp).resolve()
      for path, content in before.items():
        _write(folder / path, content)
      include = [f"--include={path}" for path in touched]
      for patch in series.patches[::-1 if reverse else 1]:
        _git_apply(folder, patch, reverse, *include)
      after = {path: _read(folder / path) for path in touched}
    try:
      for path, content in after.items():
        _write(self.path / path, content)
    except BaseException:
      for path, content in before.items():
        _write(self.path / path, content)
      raise


@dataclasses.dataclass(frozen=True)
class Header:
  """What stands before the diff in a file of `git format-patch`.

  Attributes:
    message: the message of the commit.
    author: the environment in which git makes the commit, the same whenever it
      does.
  """
  message: str
  author: Mapping[str, str]


def header(content: bytes) -> Header:
  """Reads the header of a patch."""
  head, _, _ = content.decode().partition("\ndiff --git ")
  fields, _, body = head.partition("\n\n")
  match = re.search(r"^From: (.+) <(.+)>\nDate: (.+)\nSubject: \[PATCH\] "
                    r"(.+(?:\n .+)*)", fields, re.MULTILINE)
  assert match is not None, fields
  name, email, date, subject = match.groups()
  subject = subject.replace("\n ", " ")
  author = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", name), ("EMAIL", email),
                                ("DATE", date))}
  return Header(f"{subject}\n\n{body.strip()}\n", author)


def _is_released(path: str) -> bool:
  """Whether a file of JAX's repository is in the packages that are released."""
  return path.startswith("jax/") and path.endswith(".py")


def _read(path: pathlib.Path) -> bytes | None:
  return path.read_bytes() if path.is_file() else None


def _write(path: pathlib.Path, content: bytes | None) -> None:
  """Makes a file hold this, or not be there."""
  if content == _read(path):
    return
  # Not in place: installers link such files to those in their caches.
  path.unlink(missing_ok=True)
  if content is not None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def apply(path: str | os.PathLike, *, check: bool = False, commit: bool = True,
          reverse: bool = False) -> str:
  """Puts the diffs into the source of JAX, or takes them out.

  Args:
    path: a git checkout, or the folder that has the folder `jax` of an unpacked
      release.
    check: only say what would be done.
    commit: make commits, in a checkout; if not, change only the files.
    reverse: take the diffs out.

  Returns:
    What was done, for a person.

  Raises:
    CheckoutError: the tree is not what there are diffs for, or is not clean. It
      is as it was.
  """
  tree = Tree(path)
  if commit:
    tree.check_clean()
  try:
    series, state = tree.find()
  except CheckoutError:
    tree.check_clean()  # It says more of what to do.
    raise
  what = (f"the {len(series.patches)} diffs for JAX "
          f"{', '.join(r.release for r in series.releases)}")
  if (state is State.PATCHED) != reverse:
    return (f"{tree.path}: {what} are "
            f"{'not in' if reverse else 'in already'}; there is nothing to do.")
  tree.check_clean(but=tuple(series.ids) if reverse and not commit else ())
  done = "taken out of it" if reverse else "put into it"
  if tree.is_checkout:
    done += ", as commits" if commit else ", without commits"
  if check:
    return f"{tree.path}: {what} can be {done}."
  try:
    tree.change(series, reverse, commit)
  except OSError as error:
    raise CheckoutError(
        f"{tree.path} is as it was: {error}. Give yourself the right to change "
        "it, or make room. See docs/pages/errors.md#apply-write.") from error
  return f"{tree.path}: {what} were {done}."
