"""The loop: the six steps of reinforcement learning from rewards, for every algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from zoo.algorithms.base import absent_models_named, called, checked_batch, checked_state
from zoo.batch import Batch
from zoo.build import Run
from zoo.config import ConfigError
from zoo.distributed import gathered, rank
from zoo.seeds import drawing_from, torch_generator
from zoo.train.gradients import Gradients
from zoo.train.metrics import Pool
from zoo.train.optimizer import lr_factor
from zoo.train.update import Updated, update

if TYPE_CHECKING:
    from zoo.train.session import Session


def train(run: Run, session: Session) -> None:
    """Train from where the session stands to the last step.

    (1) sample N prompts × G completions, (2) score them, (3) compare with a baseline,
    (4) turn that into advantages, (5) form the loss, (6) pay for drift, step.
    Offline data skip (1) and (2). Logs, checkpoints and evaluations count steps; learning rates
    count updates.
    """
    algorithm, models, memory = run.algorithm, run.models, session.memory
    for step in session.steps():
        pool = Pool()
        with session.step(step):
            with memory.phase("rollout"), session.interrupt.at_once():
                sampled = run.source.next(step)  # (1) sample  (2) reward
            if sampled.batch is not None:
                batch = sampled.batch.to(run.accelerator.device)
                with run.timer("prepare"), memory.phase("prepare"), session.interrupt.at_once():
                    batch = prepared(batch, run)  # (3) baseline  (4) advantages
                with run.timer("update"), memory.phase("update"):
                    for made, minibatch in enumerate(minibatches(batch, run, step), 1):
                        done = _update(minibatch, run, session, pool, step)  # (5) loss  (6) price
                        # Such as too far from the sampler. Metrics are the same on every process;
                        # what a stranger makes of them need not be.
                        if any(gathered(_enough(run, done.metrics))):
                            if made < algorithm.updates_per_step:
                                pool.add("stopped_early", 1.0)
                            break
                sampled.batch = batch
            with run.timer("sync"):
                run.source.sync(run.policy)
        state = algorithm.next_state(models.state, pool.means())
        models.state = checked_state(algorithm, state, "next_state")
        session.record(step, sampled, pool)
        session.evaluate_if_due(step)
        session.checkpoint_if_due(step)


def prepared(batch: Batch, run: Run) -> Batch:
    """What the algorithm makes of a batch, checked; the step's only update may begin in it."""
    run.models.gradients = _only_gradients(run)
    with absent_models_named(run.algorithm):
        return checked_batch(run.algorithm, run.algorithm.prepare(batch, run.models))


def _only_gradients(run: Run) -> Gradients | None:
    """Gradients of a step's update that `prepare` may add to already; None where it may not.

    With several updates those to come read other weights, and adapters with dropout read other
    values under gradient than without.
    """
    lora = run.config.model.lora
    if run.algorithm.updates_per_step > 1 or (lora is not None and lora.dropout > 0):
        return None
    return Gradients(
        run.algorithm,
        run.trainables,
        run.max_completion_length,
        run.config.train.micro_batch_tokens,
    )


def minibatches(batch: Batch, run: Run, step: int) -> Iterator[Batch]:
    """The passes over a batch: epochs × minibatches of whole groups, shuffled anew each epoch."""
    for epoch in range(run.algorithm.epochs):
        generator = torch_generator(run.config.seed, "minibatches", step, epoch)
        yield from batch.minibatches(run.algorithm.minibatches, generator)


def _enough(run: Run, metrics: Mapping[str, float]) -> bool:
    """The algorithm's own word, its mistakes told by their place."""
    try:
        return bool(run.algorithm.enough(metrics))
    except ConfigError:
        raise
    except Exception as error:
        raise RuntimeError(
            f"{called(run.algorithm)}: `enough` must return True or False for the metrics "
            f"({', '.join(metrics)}), and raised {type(error).__name__}: {error!s:.200}"
        ) from error


def _update(minibatch: Batch, run: Run, session: Session, pool: Pool, step: int) -> Updated:
    """One optimizer step at the learning rate of its number."""
    train = run.config.train
    factor = lr_factor(
        session.updates,
        train.steps * run.algorithm.updates_per_step,
        train,
        session.decay_from,
        train.stop_at.decay_steps * run.algorithm.updates_per_step,
    )
    for name, trainable in run.trainables.items():
        for group in trainable.optimizer.param_groups:
            group["lr"] = trainable.lr * factor
        pool.add(f"lr/{name}", trainable.lr * factor)
    dropout = drawing_from(run.config.seed, "dropout", session.updates, rank())  # model.lora's
    with dropout, absent_models_named(run.algorithm):
        done = update(
            minibatch,
            run.algorithm,
            run.models,
            run.trainables,
            max_completion_length=run.max_completion_length,
            micro_batch_tokens=train.micro_batch_tokens,
            max_grad_norm=train.max_grad_norm,
            pool=pool,
            step_on_zero_gradient=train.step_on_zero_gradient,
        )
    session.updated(done, minibatch, step)
    return done
