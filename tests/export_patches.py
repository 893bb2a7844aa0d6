"""Exports the series in `patches` from a clone of JAX, or checks them.

  python tests/export_patches.py CLONE SERIES ...          writes the diffs
  python tests/export_patches.py --check CLONE SERIES ...  compares the bytes

A series is the commits on the branch `jax_cond_patch/SERIES` of the clone that
come after the tag of its base. The check needs no branch: it puts the diffs on
the base, exports what that gives, and compares. Without SERIES it is all.

Where the clone has no tag of a base, because the release is newer, one is made
of the package that was released: `--base CLONE RELEASE SITE_PACKAGES`.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from jax_cond_patch import checkout  # noqa: E402

# Nothing in these depends on the version of git, on its settings, on when and
# by whom a series was made, or on the clone.
FORMAT = (
    "--zero-commit", "--no-signature", "--no-numbered", "--no-stat",
    "--full-index", "--no-renames", "--no-color", "--no-ext-diff",
    "--diff-algorithm=myers", "--unified=3", "--src-prefix=a/",
    "--dst-prefix=b/", "--no-thread", "--no-base", "--no-cover-letter")


def git(clone: pathlib.Path, *args: str, **kwargs) -> str:
  env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull,
         "GIT_CONFIG_NOSYSTEM": "1", **kwargs.pop("env", {})}
  return subprocess.run(["git", *args], cwd=clone, env=env, check=True,
                        stdout=subprocess.PIPE, **kwargs).stdout.decode()


def base_of(clone: pathlib.Path, series: checkout.Series) -> str:
  release = series.releases[0]
  name = release.commit or release.tag
  return git(clone, "rev-parse", "--verify", f"{name}^{{commit}}").strip()


def export(clone: pathlib.Path, commits: str, folder: pathlib.Path) -> None:
  git(clone, "format-patch", *FORMAT, "--quiet", "--output-directory",
      str(folder), commits)


def put_on(clone: pathlib.Path, base: str, series: checkout.Series) -> str:
  """Makes the commits of a series, and returns the last one."""
  with tempfile.TemporaryDirectory() as tmp:
    index = {"GIT_INDEX_FILE": os.path.join(tmp, "index")}
    git(clone, "read-tree", base, env=index)
    for patch in series.patches:
      mail = checkout.header(patch.content)
      git(clone, "apply", "--cached", "--whitespace=nowarn", "-",
          input=patch.content, env=index)
      tree = git(clone, "write-tree", "--missing-ok", env=index).strip()
      base = git(clone, "commit-tree", tree, "-p", base,
                 input=mail.message.encode(), env=dict(mail.author)).strip()
  return base


def read(folder: pathlib.Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def check(clone: pathlib.Path, series: checkout.Series) -> list[str]:
  """Returns the names of the files that are not as exported."""
  base = base_of(clone, series)
  with tempfile.TemporaryDirectory() as tmp:
    folder = pathlib.Path(tmp)
    export(clone, f"{base}..{put_on(clone, base, series)}", folder)
    exported, found = read(folder), read(checkout.patches_dir() / series.name)
  return [name for name in sorted({*exported, *found})
          if exported.get(name) != found.get(name)]


def make_base(clone: pathlib.Path, release: str, package: pathlib.Path) -> None:
  """Tags a commit with the Python files of a package, the others of its tag."""
  entry = next(r for r in checkout.manifest() if r.release == release)
  with tempfile.TemporaryDirectory() as tmp:
    env = {"GIT_INDEX_FILE": os.path.join(tmp, "index"),
           **checkout.header(next(iter(
               checkout.all_series())).patches[0].content).author}
    git(clone, "read-tree", entry.build_files, env=env)
    for path in sorted(package.glob("jax/**/*.py")):
      name = str(path.relative_to(package))
      if name != "jax/version.py":
        blob = git(clone, "hash-object", "-w", "--", str(path)).strip()
        git(clone, "update-index", "--add", "--cacheinfo",
            f"100644,{blob},{name}", env=env)
    tree = git(clone, "write-tree", "--missing-ok", env=env).strip()
    commit = git(clone, "commit-tree", tree, "-p", entry.build_files, env=env,
                 input=f"The package of JAX {release}\n".encode()).strip()
  git(clone, "tag", f"jax-v{release}", commit)


def main() -> int:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument("--check", action="store_true")
  parser.add_argument("--base", action="store_true")
  parser.add_argument("clone", metavar="CLONE", type=pathlib.Path)
  parser.add_argument("series", metavar="SERIES", nargs="*")
  args = parser.parse_args()
  if args.base:
    release, package = args.series
    make_base(args.clone, release, pathlib.Path(package).resolve())
    return 0
  failed = False
  for series in checkout.all_series():
    if args.series and series.name not in args.series:
      continue
    if args.check:
      differ = check(args.clone, series)
      print(f"{series.name}: {', '.join(differ) or 'as exported'}", flush=True)
      failed |= bool(differ)
    else:
      folder = checkout.patches_dir() / series.name
      shutil.rmtree(folder, ignore_errors=True)
      export(args.clone, f"{base_of(args.clone, series)}.."
             f"refs/heads/jax_cond_patch/{series.name}", folder)
      print(f"{series.name}: {len(read(folder))} diffs", flush=True)
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
