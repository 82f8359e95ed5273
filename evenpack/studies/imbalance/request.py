"""The options of `evenpack study imbalance`, checked before any lengths are read."""

from evenpack.errors import ConfigError
from evenpack.studies.imbalance.arguments import ImbalanceArguments
from evenpack.studies.imbalance.extrapolated.reference import PUBLISHED_CLUSTER, PUBLISHED_DEVICES, PUBLISHED_LENGTHS
from evenpack.studies.imbalance.measured.logged_run import LoggedRun, log_of_run, read_logged_run
from evenpack.studies.imbalance.run_settings import cluster_options
from evenpack.studies.imbalance.simulated.simulation import parse_devices
from evenpack.studies.imbalance.simulated.step_cost import StepCost, find_cost
from evenpack.studies.plotting import require_plot
from evenpack.studies.statistics.laws import Gumbel

_DEVICES = "1..2048"
FEWEST_REPLAYED_STEPS = 2
"""Least number of steps of a replay: an interval needs two."""


class ImbalanceRequest:
    """The options, and the logs that they name.

    Raises: ConfigError for an invalid option; DataError for a log that cannot be read.
    """

    def __init__(self, given: ImbalanceArguments) -> None:
        self.given = given
        _check(given)
        self.devices = parse_devices(_DEVICES if given.devices is None else given.devices)
        self.replayed: tuple[int, ...] = () if given.replay is None else parse_devices(given.replay, option="--replay")
        self.cost: StepCost | None = None if given.cost_model is None else find_cost(given.cost_model)
        """None: by the subject's model."""
        self.reference_law = Gumbel(location=given.reference_location, scale=given.reference_scale)
        self.log: LoggedRun | None = None
        """The log that is named; None: the run's own, if there is one."""
        self.baseline: LoggedRun | None = None
        if given.baseline_run is not None:
            self.baseline = read_logged_run(log_of_run(given.baseline_run), warm_up_steps=given.log_warmup)
        if given.log is not None:
            self.log = read_logged_run(given.log, column=given.log_column, warm_up_steps=given.log_warmup)

    @property
    def has_baseline(self) -> bool:
        """Whether a speed-up of measured steps is asked for."""
        return self.given.baseline_run is not None or self.given.padded_baseline is not None

    def shows_reference(self, origin: str) -> bool:
        """Whether the published curve is drawn: by default beside the lengths that it was published for."""
        if self.given.published is not None:
            return self.given.published
        own = (self.reference_law, self.given.reference_devices) != (PUBLISHED_CLUSTER, PUBLISHED_DEVICES)
        return own or origin == PUBLISHED_LENGTHS

    def simulated_devices(self, ranks: int | None) -> tuple[int, ...]:
        """Returns the numbers of devices to simulate; the run's own is among them unless others were named.

        Those that are replayed always are.
        """
        own = () if self.given.devices is not None or ranks is None else (ranks,)
        return tuple(sorted({*self.devices, *self.replayed, *own}))

    def refuse_replay(self, origin: str) -> None:
        """Checks that no replay of a plain list of lengths is asked for. Raises: ConfigError."""
        if self.replayed:
            raise ConfigError(
                f"--replay computes the batches of a run, and {origin} is a list of lengths: give a run file (.yaml) "
                "whose data is prepared"
            )

    def refuse_log_options(self) -> None:
        """Checks that no option is given for a log that there is not. Raises: ConfigError."""
        for name in ("baseline_run", "padded_baseline", "log_column", "log_warmup", "log_devices"):
            if getattr(self.given, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is an option for a log: give it with --log FILE, or a run (.yaml) "
                    "that has trained"
                )


def _check(given: ImbalanceArguments) -> None:
    for path in (given.plot, given.plot_steps):
        if path is not None:
            require_plot(path)
    for name in ("reference_devices", "log_devices"):
        count = getattr(given, name)
        if count is not None and count < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {count}")
    cluster_options(given, None, baseline=None, packing_factor=1.0)
    if given.replay_steps < FEWEST_REPLAYED_STEPS:
        raise ConfigError(f"--replay-steps must be {FEWEST_REPLAYED_STEPS} or more, not {given.replay_steps}")
    if given.log_warmup is not None and given.log_warmup < 0:
        raise ConfigError(f"--log-warmup must be 0 steps or more, not {given.log_warmup}")
    if given.padded_baseline is not None and not 0 < given.padded_baseline < float("inf"):
        raise ConfigError(f"--padded-baseline is a number of sequences/s above 0, not {given.padded_baseline}")
    if given.padded_baseline is not None and given.baseline_run is not None:
        raise ConfigError("--padded-baseline and --baseline-run both say what the speed-up is over: give one of them")
    if given.log is not None and given.padded_baseline is None and given.baseline_run is None:
        raise ConfigError(
            f"--log {given.log} gives rates; a speed-up needs those of padded training on the same devices too: give "
            "them as --padded-baseline SEQ/S, above 0, or name a padded run by --baseline-run"
        )
