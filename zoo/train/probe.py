"""Steps that are metered and thrown away: whose bytes are alive at the peak of each phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zoo.build import Run
from zoo.distributed import gathered
from zoo.measure.meter import TensorMeter
from zoo.train.figures import SAMPLER, components, sampler_copies
from zoo.train.loop import minibatches, prepared
from zoo.train.metrics import Pool
from zoo.train.update import update

PROBES = 2  # the first makes the optimizers' states, the second has them from the start

Peaks = dict[str, dict[str, int]]  # phase → label → bytes at the phase's peak, and "total"


def probe(run: Run, steps: int = PROBES, fresh: bool = True, cold: bool = False) -> list[Peaks]:
    """Peaks of live tensor bytes of `steps` training steps with the longest rows there can be.

        peak(phase) = max over its time of Σ nbytes(storage), over the storages alive

    The batch is the source's `fullest`: the longest prompts (or data), completions up to the limit,
    and in every group both rewards, so that nothing is skipped. Sizes then depend on the
    configuration alone, and are the same to the byte in every run of one process on a CPU. The
    learning rate is 0 and the weights stay as they are, bit for bit; the states of the optimizers
    are lost, so it is called when all is saved. With several processes a phase is that of the
    process that holds most, and what they tell each other counts.

    Args:
        fresh: begin without optimizer states, as a run does.
        cold: no step was trained in this process, so that one goes before that nobody keeps: what
            a first step makes for all later ones (the epoch's order, what packing has tried out)
            is no part of a step.
    Returns:
        [steps] {phase: {label: bytes}}, labels as in `TensorMeter`; the phases are the loop's:
        rollout, prepare, update.
    """
    modules, optimizers = components(run)
    if cold:
        probe(run, steps=1, fresh=fresh)
    for optimizer in optimizers.values():
        if fresh:
            optimizer.state.clear()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    found = []
    for step in range(steps):
        meter = TensorMeter(modules, optimizers)

        @contextmanager
        def phase(name: str, meter: TensorMeter = meter) -> Iterator[None]:
            with meter.phase(name):
                meter.label(SAMPLER, sampler_copies(run))
                yield

        with phase("rollout"):
            batch = run.source.fullest(run.config.train.steps)
            batch = batch.to(run.accelerator.device)
        with phase("prepare"):
            batch = prepared(batch, run)
        with phase("update"):
            for minibatch in minibatches(batch, run, step):
                update(
                    minibatch,
                    run.algorithm,
                    run.models,
                    run.trainables,
                    max_completion_length=run.max_completion_length,
                    micro_batch_tokens=run.config.train.micro_batch_tokens,
                    max_grad_norm=run.config.train.max_grad_norm,
                    pool=Pool(),
                    step_on_zero_gradient=True,
                )
                del minibatch
            del batch
        run.source.sync(run.policy)
        found.append(_largest(meter.peaks))
    return found


def _largest(mine: Peaks) -> Peaks:
    """Of each phase, the split of the process with the highest peak."""
    everyone: list[Peaks] = gathered(mine)
    return {phase: max((p[phase] for p in everyone), key=lambda p: p["total"]) for phase in mine}
