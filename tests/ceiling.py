"""The sizes of the house beside their ceilings in pyproject.toml, which only fall: who adds lines takes others away. `make lint` runs it."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("common", "model", "dataset", "trainer", "encoders", "scripts", "benchmarks")


def files(folder: str, suffix: str) -> list[bytes]:
    """The contents of a folder's files that git knows."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", f"{folder}/*{suffix}"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return [(ROOT / name).read_bytes() for name in names if name and (ROOT / name).is_file()]


def main() -> int:
    """Returns 1 if a size is above its ceiling."""
    ceilings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["minimind"]["ceilings"]
    sizes = {
        "product_lines": sum(len(file.splitlines()) for folder in PRODUCT for file in files(folder, ".py")),
        "tests_lines": sum(len(file.splitlines()) for file in files("tests", ".py")),
        "docs_bytes": sum(len(file) for file in files("docs", ".md")),
    }
    for name, size in sizes.items():
        print(f"{name}: {size:,} of {ceilings[name]:,}")
        if size > ceilings[name]:
            print(
                f"error: {name} is above its ceiling in pyproject.toml: name what leaves for what was added",
                file=sys.stderr,
            )
    return int(any(size > ceilings[name] for name, size in sizes.items()))


if __name__ == "__main__":
    sys.exit(main())
