"""A loop of episodes: a step schedules and measures some modules, and PPO learns from them."""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import write_file
from tokmill.base.progress import Progress, human_count
from tokmill.mlir.env import ScheduleEnv
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.space import LOOPS
from tokmill.models.model import Tensors
from tokmill.rl import actions, ppo
from tokmill.rl.embedding import embeddings
from tokmill.rl.modules import facts as facts_of
from tokmill.rl.modules import modules_of
from tokmill.rl.rollout import Episode, again, play, play_new_schedules
from tokmill.rl.schedule_task import Schedules, SchedulesConfig, batch_of
from tokmill.store.manifest import encode, read_json
from tokmill.store.store import Store
from tokmill.tasks.task_inputs import Facts
from tokmill.training.data import Micro, PartLoss
from tokmill.training.engines.engine import Engine
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.session import Session

MODULES = "modules.json"
"""File of a run: the name of each module → the sha256 of its text."""
CACHE = "measurements.sqlite"
"""File of a run: what was measured, if the recipe names no other."""
BEST = "schedules.json"
"""File of a run: the best schedule of each module that it learned from.

Its gain is that of the one measurement that the training made of it. The best of many such is
partly the luckiest, so it is too large by some noise: `rl eval --samples` measures again.
"""


class ScheduleLoop:
    """A step is `bench_count` episodes, and updates from what they brought."""

    reads_stores = False
    unit = "evaluations"
    notes: Sequence[str] = ()

    def __init__(
        self,
        config: TrainConfig,
        task: Schedules,
        stores: Sequence[Store],
        facts: Facts,
        engine: Engine,
        out: Path,
    ) -> None:
        if engine.world > 1:
            raise UsageError(
                "one process learns schedules: several would disturb each other's measurements",
                where="task.kind",
                hint="leave --processes and --nodes out",
            )
        self.config, self.task, self.engine, self.out = config, task, engine, out
        self.task_config: SchedulesConfig = config.task
        self.problems, self.val_problems = modules_of(config)
        self.environment = facts_of(config, self.problems, self.val_problems)
        self.evaluates = bool(self.val_problems)

    @staticmethod
    def rows_a_step(config: TrainConfig, world: int) -> int:
        return max(int(config.task.ppo_batch_size), int(config.task.value_batch_size))

    @staticmethod
    def check(config: TrainConfig) -> Mapping[str, Any]:
        """Read the modules; raises `TokmillError` for those that cannot be learned from."""
        return facts_of(config, *modules_of(config))

    @contextmanager
    def steps(self, steps: range) -> Iterator[None]:
        """Keep a child that measures, and the cache, for these steps."""
        self._check_modules()
        place = Path(self.task_config.cache) if self.task_config.cache else self.out / CACHE
        if steps.start and not place.exists():
            _say(
                f"the measurements of the steps before are gone ({place}): what follows is "
                "measured anew, and differs from what an unbroken run would have measured"
            )
        with Measurements(settings_of(self.task_config), place) as self.measure_one:
            self.env = self._make_env(self.problems)
            if self.val_problems:
                self.val_env = self._make_env(self.val_problems)
            try:
                yield
            finally:
                write_file(self.out / BEST, encode(self.task.best))
            missed = self.measure_one.evaluations - self.measure_one.hits
            if missed:
                _say(
                    f"{human_count(missed, 'schedule')} of {self.measure_one.evaluations:,} were "
                    f"measured now, the others came from {place}; with this file a repetition is "
                    "exact, without it times differ"
                )

    def next(self) -> tuple[float, float]:
        """Say how many evaluations the step will make; nothing is drawn yet."""
        return self.task_config.bench_count, self.task_config.bench_count

    def learn(self, session: Session, total: int) -> tuple[dict[str, float], int]:
        step = session.state.step
        hits = self.measure_one.hits
        episodes = play_new_schedules(
            self.engine.act,
            self.env,
            drawn(len(self.problems), step, self.task_config.bench_count, self.config.data.seed),
            self.task.layout,
            lambda number, schedule: self.task.memory.knows(self.problems[number].name, schedule),
            self.task_config.redraws,
        )
        self._remember(episodes)
        moves = moves_of(episodes, self.task_config, self._imitated())
        report = self._improve(session, moves)
        if self.task.entropy.see(report["entropy"]):
            _say(
                f"step {step + 1}: the policy is nearly certain: its entropy is "
                f"{report['entropy']:.1%} of the largest possible; the weight of the entropy grows"
            )
        best = [self.task.best.get(one.name, {}).get("speedup", 1.0) for one in self.problems]
        report |= {
            "entropy_alarm": float(self.task.entropy.alarmed),
            "entropy_coef": self.task.entropy.now,
            "evaluations": session.state.tokens + total,
            "cached": (self.measure_one.hits - hits) / len(episodes),
            **outcome(episodes),
            "reward": float(np.mean([sum(one.rewards) for one in episodes])),
            "best_speedup": float(np.exp(np.mean(np.log(best)))),
        }
        return report, 1

    def not_finite(self, step: int, norm: float, losses: Sequence[PartLoss]) -> TokmillError:
        return TokmillError(
            f"step {step + 1}: the loss or its gradient is not finite (norm {norm})",
            where=str(self.out),
            hint="a checkpoint holds the weights from before this step; a smaller optim.lr helps",
        )

    def measure(self, quiet: bool) -> dict[str, float]:
        """Schedule modules that are never learned from, by the likeliest actions."""
        with Progress("held out", len(self.val_problems), unit="modules", quiet=quiet) as bar:
            episodes = play(
                self.engine.act,
                self.val_env,
                range(len(self.val_problems)),
                self.task.layout,
                greedy=True,
                done=lambda: bar.advance(1),
            )
        metrics = outcome(episodes)
        return {"loss": -float(np.log10(metrics["speedup"])), **metrics}

    def _make_env(self, problems: Sequence[Problem]) -> ScheduleEnv:
        model = self.task.model.config
        return ScheduleEnv(problems, self.measure_one, model.sizes, model.view)

    def _improve(self, session: Session, moves: Tensors) -> dict[str, float]:
        """Update the weights by some passes over moves; return the means of what was seen.

        Each is a mean over the moves that it counts: of the policy and the value over those that
        were played, of imitation over those that are imitated, of the loss over all.
        """
        config, rows = self.task_config, len(moves.targets["action"])
        own = int(moves.values["acts"].sum())
        judged = np.flatnonzero(moves.values["judges"].numpy())
        sums: dict[str, float] = {}
        passes = 0
        for parts in ppo.minibatches(rows, config.ppo_batch_size, config.ppo_epochs):
            kl = 0.0
            for part in parts:
                metrics = session.update([Micro(part, rows_of(moves, part))], len(part))
                kl += metrics["kl"]
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + value
            passes += 1
            if config.max_kl and kl / own > config.max_kl:
                break
        if config.value_batch_size:
            alone = rows_of(moves, judged)
            alone.values |= {name: torch.zeros(len(judged)) for name in ("acts", "imitates")}
            for parts in ppo.minibatches(len(judged), config.value_batch_size, config.value_epochs):
                for part in parts:
                    session.update([Micro(part, rows_of(alone, part))], len(part))
        most = max(sums.pop("most_entropy"), 1e-9)
        counted = {"loss": rows, "imitation_loss": rows - own}
        report = {
            name: value / max(1, passes * counted.get(name, own)) for name, value in sums.items()
        }
        return report | {"entropy": sums["entropy"] / most, "passes": passes, "moves": own}

    def _remember(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            problem = self.problems[episode.problem]
            self.task.memory.see(
                problem.name, episode.rewards[-1], episode.chosen, episode.schedule
            )
            # What is slower than no schedule is no best one.
            if episode.gain > self.task.best.get(problem.name, {}).get("speedup", 1.0):
                self.task.best[problem.name] = {
                    "speedup": episode.gain,
                    "milliseconds": episode.result.nanoseconds / 1e6,
                    "schedule": LOOPS.text(problem, episode.schedule),
                }

    def _imitated(self) -> list[Episode]:
        """Return one of the best schedules of each module, with the weight of its moves."""
        if not self.task_config.imitation_coef:
            return []
        episodes = []
        for number, problem in enumerate(self.problems):
            kept = self.task.memory.best(problem.name)
            draw = float(torch.rand(()))
            if kept:
                weight, chosen = kept[int(draw * len(kept))]
                episodes.append(again(self.env, number, chosen, weight))
        return episodes

    def _check_modules(self) -> None:
        """Write the digests of all modules, or compare them with those that the run began with."""
        place = self.out / MODULES
        every = [*self.problems, *self.val_problems]
        now = {one.name: hashlib.sha256(one.text.encode()).hexdigest() for one in every}
        before = read_json(place, dict[str, str]) if place.exists() else now
        for name in [*before, *now]:
            if before.get(name) != now.get(name):
                what = (
                    "is new" if name not in before else "has changed" if name in now else "is gone"
                )
                raise TokmillError(
                    f"the module {name} {what} since the run began",
                    where=str(self.out),
                    hint="put the old file back, or begin another run: its policy and its best "
                    "schedules are of the modules that it began with",
                )
        write_file(place, encode(now))


def drawn(problems: int, step: int, count: int, seed: int) -> list[int]:
    """Return the problems of a step: each comes as often as any other, in a shuffled order."""
    places = range(step * count, (step + 1) * count)
    orders = {
        turn: np.random.default_rng((seed & ((1 << 63) - 1), turn)).permutation(problems)
        for turn in {place // problems for place in places}
    }
    return [int(orders[place // problems][place % problems]) for place in places]


def moves_of(
    episodes: Sequence[Episode], config: SchedulesConfig, imitated: Sequence[Episode] = ()
) -> Tensors:
    """Return the moves of episodes with their advantages and returns.

    `imitated`: episodes whose moves are imitated alone, as much as their last rewards say.
    """
    pairs = [ppo.advantages(e.rewards, e.values, config.gamma, config.gae_lambda) for e in episodes]
    everyone = [*episodes, *imitated]
    batch = batch_of(
        embeddings.batch([one for e in everyone for one in e.seen]),
        actions.masks_of([one for e in everyone for one in e.masks]),
    )
    chosen = np.stack([one for e in everyone for one in e.chosen])
    batch.targets["action"] = torch.from_numpy(chosen)
    own = sum(len(one.chosen) for one in episodes)
    numbers = {
        "advantage": ppo.normalised(np.concatenate([advantage for advantage, _ in pairs])),
        "target": np.concatenate([target for _, target in pairs]),
        "logp": np.array([one for e in episodes for one in e.logp]),
        "acts": np.ones(own),
        "judges": np.ones(own),
        "imitates": np.zeros(own),
    }
    weights = np.array([e.rewards[-1] for e in imitated for _ in e.chosen])
    for name, value in numbers.items():
        more = weights if name == "imitates" else np.zeros(len(weights))
        batch.values[name] = torch.from_numpy(np.concatenate((value, more)).astype(np.float32))
    return batch


def rows_of(moves: Tensors, rows: np.ndarray[Any, Any]) -> Tensors:
    taken = torch.from_numpy(rows)
    return Tensors(
        {},
        moves.document[taken],
        moves.position[taken],
        whole=True,
        values={name: value[taken] for name, value in moves.values.items()},
        targets={name: value[taken] for name, value in moves.targets.items()},
        entry=torch.arange(len(rows)),
    )


def outcome(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the geometric mean of gains, and the shares that are slower or gave no result.

    What gave no result counts as 1: the module without a schedule would run.
    """
    gains = np.array([episode.gain for episode in episodes])
    return {
        "speedup": float(np.exp(np.mean(np.log(gains)))),
        "regressions": float(np.mean(gains < 1)),
        "failed": float(np.mean([episode.result.status != "ok" for episode in episodes])),
    }


def settings_of(config: SchedulesConfig) -> Settings:
    return Settings(
        runs=config.runs,
        seconds=config.seconds,
        most_seconds=config.most_seconds,
        memory_mb=config.memory_mb,
    )


def _say(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)
