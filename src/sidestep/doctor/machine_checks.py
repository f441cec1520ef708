"""Threads, environment variables and packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sidestep.config import RunConfig
from sidestep.doctor.finding import Finding, warning
from sidestep.doctor.surroundings import Surroundings
from sidestep.threads import threads_per_process

MODE_VARIABLE = "SIDESTEP_MODE"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
NUM_PROCESSES = 2  # trainer and rollout

# (key, value) -> (module, extra of this package): what a choice needs beyond the dependencies.
NEEDS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("engine.kind", "vllm"): ("vllm", "vllm"),
    ("engine.kind", "sglang"): ("sglang", "sglang"),
    ("task.kind", "reasoning_gym"): ("reasoning_gym", "reasoning"),
    ("task.kind", "math"): ("math_verify", "math"),
    ("task.kind", "dataset"): ("datasets", "datasets"),
}


def threads(around: Surroundings) -> Iterator[Finding]:
    for name in THREAD_VARIABLES:
        text = around.variables.get(name, "").split(",")[0].strip()
        if text.isdecimal() and int(text) > 1 and int(text) * NUM_PROCESSES > around.num_cores:
            yield warning(
                "threads_oversubscribed",
                (name,),
                f"{name}={text}: trainer and rollouts start that many threads each, on "
                f"{around.num_cores} cores",
                f"unset {name}, or set it to {threads_per_process(around.num_cores)}",
            )
    if around.variables.get("OMP_WAIT_POLICY", "").lower() == "active":
        yield warning(
            "threads_spin",
            ("OMP_WAIT_POLICY",),
            "OMP_WAIT_POLICY=active: threads that wait keep their core busy, which the other "
            "process needs: 30 times slower was seen",
            "unset OMP_WAIT_POLICY, or set it to passive",
        )


def control(config: RunConfig, around: Surroundings) -> Iterator[Finding]:
    mode, override = config.control.mode, around.variables.get(MODE_VARIABLE)
    if override and override != mode:
        yield warning(
            "control_overridden",
            (MODE_VARIABLE, "control.mode"),
            f'{MODE_VARIABLE}={override} overrides control.mode = "{mode}"',
            f"unset {MODE_VARIABLE} if that is not meant",
        )
    if mode != "off" and config.control.snapshot == "applied":
        yield warning(
            "control_snapshot",
            ("control.snapshot",),
            'control.snapshot = "applied": the cosine then depends on what control did before',
            'control.snapshot = "raw" compares raw gradients',
        )


def missing_extras(choices: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    """choices: values of the config by key."""
    for (key, value), (module, extra) in NEEDS.items():
        if choices.get(key) == value and not around.is_installed(module):
            yield Finding(
                "missing_extra",
                "error",
                (key,),
                f'{key} = "{value}" needs {module}, which is not installed',
                f"pip install 'sidestep[{extra}]'",
            )
