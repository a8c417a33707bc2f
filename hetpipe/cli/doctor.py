"""`hetpipe doctor`: tests backends and devices, repairs some faults, and names cures for others."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli.options import BackendsOption, JsonOption, split_names
from hetpipe.cli.output import Output

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
    """Examine every backend and device. Exit 1 if a named backend, or a device of an automatic
    cluster, does not work."""
    from hetpipe.check.selftest_process import run_selftests
    from hetpipe.errors import HetpipeError
    from hetpipe.sdk.host.registry import backend_names, discover_devices

    output = Output(json)
    named = split_names(backends) or []
    findings: list[dict[str, str]] = []
    for name in named or backend_names():
        for finding in examine(name):
            findings.append(finding)
            _show(output, finding)
    infos, _ = discover_devices(named or None)
    tests: dict[str, dict[str, Any]] = {}
    if selftest:
        for device_id, result in run_selftests(infos):
            tests[device_id] = result
            level = "ok" if result["ok"] else "broken"
            _show(output, _finding("", level, f"{device_id}: {_tested(result)}", ""))
    output.finish(
        {
            "findings": findings,
            "devices": [{**asdict(info), "selftest": tests.get(info.id)} for info in infos],
        }
    )
    failed = [
        info.id
        for info in infos
        if not tests.get(info.id, _OK)["ok"] and (info.backend in named or _joins(info))
    ]
    broken = {f["backend"] for f in findings if f["level"] == "broken" and f["backend"] in named}
    if failed or broken:
        what = [*(f"backend {name}" for name in sorted(broken)), *failed]
        raise HetpipeError(f"not working on this machine: {', '.join(what)}")


def examine(name: str) -> list[dict[str, str]]:
    """Return a backend's findings about itself, or one finding that says why it is broken."""
    from hetpipe.errors import BackendError
    from hetpipe.sdk.host.registry import findings_of

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
        f"{result['copy_Bps'] / 1e9:.3g} GB/s (best of {result['bursts']}, measured)"
    )


def _joins(info: DeviceInfo) -> bool:
    """Return whether the device may join an automatic cluster."""
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
