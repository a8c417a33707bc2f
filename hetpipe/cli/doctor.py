"""`hetpipe doctor`: tests of backends and devices, repairs, and cures for the rest."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli.options import BackendsOption, JsonOption, split_names
from hetpipe.cli.output import Output
from hetpipe.cli.progress import progress_bar

if TYPE_CHECKING:
    from hetpipe.sdk.info import DeviceInfo

STYLES = {"ok": "green", "repaired": "cyan", "missing": "yellow", "broken": "red"}


def command(
    backends: BackendsOption = None,
    selftest: Annotated[
        bool, typer.Option(help="Run a few graphs on every device and compare the results.")
    ] = True,
    json: JsonOption = None,
) -> None:
    """Examine every backend and device. Exit 1 if a device that joins unasked fails its test."""
    from hetpipe.cli.selftest import run_selftest
    from hetpipe.errors import HetpipeError
    from hetpipe.sdk import backend_names, discover_devices

    output = Output(json)
    findings: list[dict[str, str]] = []
    for name in split_names(backends) or backend_names():
        findings += examine(name)
    for finding in findings:
        _show(output, finding)
    infos, _ = discover_devices(split_names(backends))
    tests: dict[str, dict[str, Any]] = {}
    if selftest:
        with progress_bar() as progress:
            for done, info in enumerate(infos):
                progress(f"testing {info.id}", done, len(infos))
                tests[info.id] = run_selftest(info.id)
        for device_id, result in tests.items():
            level = "ok" if result["ok"] else "broken"
            _show(output, _finding("", level, f"{device_id}: {_tested(result)}", ""))
    output.finish(
        {
            "findings": findings,
            "devices": [{**asdict(info), "selftest": tests.get(info.id)} for info in infos],
        }
    )
    failed = [info.id for info in infos if _matters(info) and not tests.get(info.id, _OK)["ok"]]
    if failed:
        raise HetpipeError(f"these devices do not work here: {', '.join(failed)}")


def examine(name: str) -> list[dict[str, str]]:
    """A backend's findings about itself, or the reason why it has none."""
    from hetpipe.errors import BackendError
    from hetpipe.sdk.registry import findings_of

    try:
        described = findings_of(name)
    except BackendError as error:
        return [_finding(name, "broken", str(error), "")]
    return [_finding(name, level, what, cure) for level, what, cure in described]


_OK = {"ok": True}


def _tested(result: dict[str, Any]) -> str:
    if not result["ok"]:
        return f"self-test failed: {result['message']}"
    return (
        f"{result['message']}; {result['gflops_matmul']:.3g} GFLOP/s, copies "
        f"{result['copy_Bps'] / 1e9:.3g} GB/s"
    )


def _matters(info: DeviceInfo) -> bool:
    return not (info.capabilities.emulated or info.capabilities.reference)


def _finding(backend: str, level: str, what: str, cure: str) -> dict[str, str]:
    return {"backend": backend, "level": level, "what": what, "cure": cure}


def _show(output: Output, finding: dict[str, str]) -> None:
    from rich.markup import escape

    level, cure = finding["level"], finding["cure"]
    line = f"[{STYLES.get(level, 'white')}]{level:>9}[/]  {escape(finding['what'])}"
    if cure:
        line += f"  [bold]cure: {escape(cure)}[/bold]"
    output.console.print(line, highlight=False, soft_wrap=True)
