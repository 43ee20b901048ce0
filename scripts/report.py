"""Write one HTML page about a run, or several side by side: curves, samples, settings, machine.

    python scripts/report.py out/pretrain_512.pth                      # -> out/pretrain_512.report.html and .loss.png
    python scripts/report.py out/a_512.metrics.jsonl out/b_512.metrics.jsonl --out compare.html

A run is given by its metrics file, its weight, or a folder of them. The trainer writes this page when a run ends.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder, and answers wrong flags

from collections.abc import Sequence
from pathlib import Path

from common.errors import user_errors
from common.wording import announce
from scripts.arguments import report_parser
from trainer.machine.command_line import run_cli
from trainer.reporting.html_report import write_report
from trainer.reporting.records import METRICS_SUFFIX


def main(argv: Sequence[str] | None = None) -> int:
    args = report_parser().parse_args(argv)
    metrics: list[Path] = []
    with user_errors():
        for path in map(Path, args.runs):
            if path.is_dir():
                # In an empty folder the pattern itself, which the reader's error then names
                metrics += sorted(path.glob(f"*{METRICS_SUFFIX}")) or [path / f"*{METRICS_SUFFIX}"]
            else:
                run = path.name.removesuffix(".pth").removesuffix(".best")
                metrics.append(path if path.suffix == ".jsonl" else path.with_name(run + METRICS_SUFFIX))
        page = metrics[0].with_name("compare.html")
        if args.out:
            page = Path(args.out)
        elif len(metrics) == 1:
            page = Path(str(metrics[0]).removesuffix(METRICS_SUFFIX) + ".report.html")
        picture = write_report(metrics, page)
    announce(f"report: {page}, picture: {picture}")
    return 0


if __name__ == "__main__":
    run_cli(main)
