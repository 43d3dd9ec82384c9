"""`MIRIImputer`: the gaps of a table filled by MIRI, as a transformer of scikit-learn."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from fluvial.core.noise import KeyedNoise
from fluvial.tabular.checks import number, truth, whole
from fluvial.tabular.miri.checkpoints import (
    digest_of,
    read_rounds,
    round_as_json,
    round_from_json,
    write_round,
)
from fluvial.tabular.miri.columns import KINDS, Column, Kind
from fluvial.tabular.miri.rounds import (
    Pairing,
    Round,
    Rounds,
    VelocityMLP,
    apply_rounds,
    run_rounds,
)
from fluvial.tabular.miri.table import Table
from fluvial.tabular.seeds import mixed, seed_of
from fluvial.training.files import load_model, put_weights, save_model

SYSTEM = "miri-imputation"
DONORS = 1_000
"""Observed values kept of every column, at most: what a column that had no gaps is filled from."""
SAMPLE = 1 << 20
"""Step of the keyed noise of `MIRIImputer.sample`, far from those of the method."""
PROGRESS_ROWS = 10_000
"""Rows beyond which a bar is shown if it is not said otherwise."""

Net = Callable[[int, int], nn.Module]
"""(encoded columns D, seed) -> a network of (n, 3 D + 1) to (n, D)."""


class MIRIImputer(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Fills the gaps of a table with draws from the conditional law of what is missing.

    Mutual Information Reducing Iterations: the gaps start as noise, and each of K rounds draws them
    anew by a rectified flow that learned the present table's x_mis given x_obs (see
    `fluvial.tabular.miri.rounds`). All columns are drawn together, from one law: the joint
    distribution is what it aims at, and a draw has a larger root mean square error than a
    conditional mean, by up to sqrt(2). Where that error is what counts, ask for the mean of several
    draws, ``draws=20``.

    It is right where values are missing completely at random, and at random given columns without
    gaps. Where the chance to be missing depends on the missing value itself it is biased, as all
    methods are that know no more than the table.

    ::

        filled = MIRIImputer(random_state=0).fit_transform(frame)

    Input is an array or tensor of numbers with NaN in the gaps, or a pandas data frame, whose
    dtypes say what its columns are and are kept: numbers, integers, truth values, categories,
    texts of at most 100 kinds, dates (`fluvial.tabular.miri.columns`). Output is what came in;
    `set_output` works too. Observed values are never changed, bit for bit.

    `transform` of the rows it was fitted on gives what `fit_transform` gave. New rows go through
    the same networks. A column that had no gaps in fitting was never learned: its gaps in new rows
    are filled with random observed values of the column, with a warning; ``hide`` avoids that.

    Args:
        rounds: K.
        epochs: passes over the rows with gaps, in each round.
        batch_size: rows a step; None for 100, and more on tables of over 5,000 rows.
        lr: of Adam; falls to 0 over the second half of a round.
        hidden: sizes of the hidden layers; None for three of 128 where the encoded table has at
            most 16 columns, of 256 up to 128 columns, and of 512 beyond. The paper: three of 1001.
        ode_steps: Euler steps of a filling.
        max_steps: of the optimiser in a round, at most; what bounds the time on large tables.
        chains: fillings of each row that are carried through the rounds side by side, against
            noise that is learned by heart; None for 2,000 over the rows, between 2 and 8, and 1
            beyond 5,000 rows.
        pairing: "epoch" pairs the rows anew in every epoch; "round", as the paper's code, once a
            round, and small tables are then learned by heart.
        clamp: keep what is drawn within the observed range of its column.
        bounds: stated (low, high) by column, name or number, in place of the observed range; None
            for no end.
        kinds: by column, name or number, where the dtype does not tell: "numeric", "integer",
            "boolean", "categorical".
        hide: share of the observed entries that is hidden in a second copy of the rows, so that
            gaps are learned in every column, whatever columns have them here.
        draws: what `transform` gives is the mean of so many draws (of categories, the most
            frequent).
        net: makes a round's network, (encoded columns D, seed) -> module of (n, 3 D + 1) to (n, D);
            None for `fluvial.tabular.miri.rounds.VelocityMLP`.
        device: where the networks are.
        progress: show a bar; None for tables of more than 10,000 rows.
        random_state: seed, or a generator of NumPy that one is drawn from; None for a new one each
            time. Row i's draws depend on the seed and on i.

    Attributes:
        nets_: the networks, one a round; none if nothing was missing.
        history_: what each round did: number, losses by epoch, seconds, root mean square change.
        columns_: what each column is.
        gaps_: (d,) bool, which columns gaps were learned in.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    Raises:
        ValueError: a hyper-parameter is out of its range; a column has no value; a value is
            infinite; rows of another width in `transform`.
        TypeError: values that are no numbers, in an array, or of an unknown kind, in a frame.

    Citation: Yu et al., NeurIPS 2025, arXiv:2505.11749.
    """

    # of the models of this library: a statement of intended use, kept with the weights
    use: Any = None
    out_of_scope: tuple[dict[str, str], ...] = ()

    def __init__(
        self,
        rounds: int = 6,
        epochs: int = 100,
        batch_size: int | None = None,
        lr: float = 3e-3,
        hidden: tuple[int, ...] | None = None,
        ode_steps: int = 25,
        max_steps: int = 2_000,
        chains: int | None = None,
        pairing: Pairing = "epoch",
        clamp: bool = True,
        bounds: Mapping[Any, tuple[float | None, float | None]] | None = None,
        kinds: Mapping[Any, Kind] | None = None,
        hide: float = 0.0,
        draws: int = 1,
        net: Net | None = None,
        device: str = "cpu",
        progress: bool | None = None,
        random_state: Any = None,
    ) -> None:
        self.rounds = rounds
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.hidden = hidden
        self.ode_steps = ode_steps
        self.max_steps = max_steps
        self.chains = chains
        self.pairing = pairing
        self.clamp = clamp
        self.bounds = bounds
        self.kinds = kinds
        self.hide = hide
        self.draws = draws
        self.net = net
        self.device = device
        self.progress = progress
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    # Fitting

    def fit(
        self, X: Any, y: Any = None, *, mask: Any = None, folder: str | Path | None = None
    ) -> Self:
        """Learn to fill the gaps of X.

        Args:
            X: (n, d), gaps as NaN (in frames also None and NA).
            y: ignored.
            mask: (n, d), True where observed; what it marks as missing is taken for a gap too.
            folder: where the networks of finished rounds are kept; a fit that was stopped goes on
                after the last of them, and ends as if it had not been stopped. It needs a
                ``random_state`` that is a number.

        Raises:
            ValueError: ``folder`` holds rounds of another table or of other settings.
            NotADirectoryError, PermissionError: ``folder`` is a file, or cannot be written to.
        """
        self._fit(X, mask, folder)
        return self

    def fit_transform(
        self, X: Any, y: Any = None, *, mask: Any = None, folder: str | Path | None = None
    ) -> Any:
        """Learn from X and fill its gaps; see `fit`."""
        x, table = self._fit(X, mask, folder)
        if self.draws > 1:
            return self._averaged(table)
        return table.filled(self._decoded(x, table))

    def _fit(self, X: Any, mask: Any, folder: str | Path | None) -> tuple[Tensor, Table]:
        settings = self._settings()
        if folder is not None:
            _check_folder(folder)
            if not isinstance(self.random_state, int | np.integer):
                raise ValueError(
                    f"random_state must be a number for folder to be gone on with, got "
                    f"{self.random_state!r}"
                )
        seed = seed_of(self.random_state)
        table = Table.read(self, X, mask, reset=True)
        columns = self._learn(table)
        self.columns_ = columns
        table.values_of(columns)
        noise = KeyedNoise(seed)
        x, seen = self._encoded(table)
        chains = settings.copies(len(x)) if table.gaps.any() or self.hide else 1
        train, known, targets = x, seen, None
        if chains > 1:  # one is the table itself: no second copy of it is held
            train, known = x.repeat(chains, 1), seen.repeat(chains, 1)
        if self.hide:
            keep = noise.at(2).uniform(torch.empty(table.shape, dtype=torch.float32)) >= self.hide
            hidden = ~table.gaps & keep.numpy()
            targets = len(train)
            train = torch.cat([train, x])
            known = torch.cat([known, self._spread(hidden)])
        low, high = self._bounds()
        width = x.shape[1]

        def make(k: int) -> nn.Module:
            return self._network(width, mixed(seed, k))

        done: list[nn.Module] = []
        before: list[Round] = []
        watch = None
        if folder is not None:
            place = Path(folder)
            own = {**vars(settings), "hidden": _sizes(self.hidden), "hide": self.hide, "seed": seed}
            digest = digest_of({**own, "columns": [repr(c) for c in columns]}, train, known)
            done, before = read_rounds(place, make, digest)

            def watch(one: Round, net: nn.Module, every: Tensor) -> None:
                if one.number > len(done):
                    write_round(place, one, net, digest)

        train, nets, rounds = run_rounds(
            train,
            known,
            make,
            settings,
            noise,
            low=low,
            high=high,
            targets=targets,
            chains=chains,
            done=[net.to(self.device) for net in done],
            watch=watch,
            progress=self._bar(table.shape[0]),
        )
        rounds[: len(before)] = before  # with the losses of then
        self.nets_ = nets
        self.history_ = [vars(one) for one in rounds]
        self.gaps_ = np.array(table.gaps.any(0)) if not self.hide else np.ones(table.shape[1], bool)
        self.seed_ = seed
        self.donors_ = [_donors(table.column(j), noise.at(3)) for j in range(table.shape[1])]
        _warn_of(rounds)
        return train[: table.shape[0]], table

    def _settings(self) -> Rounds:
        number("hide", self.hide, "be a share in [0, 1)", lambda hide: 0 <= hide < 1)
        whole("draws", self.draws)
        truth("clamp", self.clamp)
        _sizes(self.hidden)
        if self.net is not None and not callable(self.net):
            raise ValueError(f"net must make a network of (D, seed), got {self.net!r}")
        _check_device(self.device)
        return Rounds(
            rounds=self.rounds,
            epochs=self.epochs,
            batch_size=self.batch_size,
            max_steps=self.max_steps,
            lr=self.lr,
            ode_steps=self.ode_steps,
            chains=self.chains,
            pairing=self.pairing,
        )

    def _learn(self, table: Table) -> list[Column]:
        kinds = table.by_number("kinds", self.kinds)
        bounds = table.by_number("bounds", self.bounds)
        for kind in kinds.values():
            if kind not in KINDS or kind == "date":
                wanted = ", ".join(k for k in KINDS if k != "date")
                raise ValueError(f"kinds must be of {wanted}, got {kind!r}")
        return [
            table.learn(j, kinds.get(j), bounds.get(j), self.clamp) for j in range(table.shape[1])
        ]

    def _network(self, width: int, seed: int) -> nn.Module:
        if self.net is not None:
            return _checked(self.net(width, seed), width)
        return VelocityMLP(width, _sizes(self.hidden) or _hidden(width), seed=seed)

    def _bar(self, rows: int) -> bool:
        return rows > PROGRESS_ROWS if self.progress is None else bool(self.progress)

    # Filling

    def transform(self, X: Any) -> Any:
        """X with its gaps filled, in the form it came in.

        Rows that were fitted on are filled as `fit_transform` filled them.
        """
        check_is_fitted(self, "columns_")
        self._settings()
        table = self._new(X)
        if self.draws > 1:
            return self._averaged(table)
        return table.filled(self._drawn(table, KeyedNoise(self.seed_)))

    def sample(self, X: Any, m: int, *, refit: bool = False) -> Any:
        """m fillings of X, for multiple imputation; pool what is estimated with each by `pool`.

        Args:
            X: as for `transform`.
            m: how many.
            refit: also fit anew, on X, for each: the draws then vary with what the networks could
                not know, as proper multiple imputation asks for, at m times the cost. Otherwise new
                noise goes through the fitted networks.

        Returns:
            (m, n, d) of an array or tensor; a list of m frames of a frame.

        Raises:
            ValueError: m is no whole number, or below 1.
        """
        m = whole("m", m)
        if truth("refit", refit):
            fresh = {**self.get_params(deep=False), "draws": 1}
            check_is_fitted(self, "columns_")
            Table.read(self, X, None, reset=False)  # of the columns of the fit
            filled = [
                type(self)(
                    **{**fresh, "random_state": mixed(self.seed_, SAMPLE + k) % 2**32}
                ).fit_transform(X)
                for k in range(m)
            ]
        else:
            check_is_fitted(self, "columns_")
            table = self._new(X)
            filled = [table.filled(values) for values in self._several(table, m)]
        if isinstance(filled[0], Tensor):
            return torch.stack(filled)
        return np.stack(filled) if isinstance(filled[0], np.ndarray) else filled

    def _new(self, X: Any) -> Table:
        table = Table.read(self, X, None, reset=False)
        table.values_of(self.columns_)
        if not table.gaps.any():  # nothing will be read: is it what was fitted?
            for j in range(table.shape[1]):
                table.column(j)
        return table

    def _several(self, table: Table, m: int) -> Iterator[list[np.ndarray]]:
        noise = KeyedNoise(self.seed_).at(SAMPLE)
        return (self._drawn(table, noise.at(k)) for k in range(m))

    def _averaged(self, table: Table) -> Any:
        many = list(self._several(table, int(self.draws)))
        means = [
            column.average(np.stack([one[j] for one in many]))
            for j, column in enumerate(self.columns_)
        ]
        return table.filled(means)

    def _drawn(self, table: Table, noise: KeyedNoise) -> list[np.ndarray]:
        """By column, values for its gaps."""
        foreign = table.gaps.any(0) & ~self.gaps_
        if not table.gaps.any():
            return [np.empty(0)] * table.shape[1]
        x, seen = self._encoded(table)
        values: dict[int, np.ndarray] = {}
        if foreign.any():
            names = [repr(self.columns_[j].name) for j in np.flatnonzero(foreign)]
            warnings.warn(
                f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''} had no gaps in fitting; "
                "gaps there are filled with random observed values, whatever the rest of the row "
                "says; fit with hide=0.2 to learn them",
                stacklevel=3,
            )
            ends = self._ends()
            for j in np.flatnonzero(foreign):
                rows = np.flatnonzero(table.gaps[:, j])
                u = noise.rows(torch.from_numpy(rows)).at(4).uniform(torch.empty(len(rows), 1))
                donors = self.donors_[j]
                values[int(j)] = donors[(u[:, 0].numpy() * len(donors)).astype(int)]
                inside = slice(ends[j], ends[j + 1])
                x[rows, inside] = torch.from_numpy(self.columns_[j].encode(values[int(j)])).to(x)
                seen[rows, inside] = True
        settings = self._settings()
        low, high = self._bounds()
        x = apply_rounds(self.nets_, x, seen, settings, noise, low=low, high=high)
        drawn = self._decoded(x, table)
        return [values.get(j, drawn[j]) for j in range(len(drawn))]

    # Encoding

    def _ends(self) -> list[int]:
        """Where each column begins in the encoded table, and its width at last."""
        return [0, *np.cumsum([column.width for column in self.columns_]).tolist()]

    def _encoded(self, table: Table) -> tuple[Tensor, Tensor]:
        """(x, seen): the table as the networks see it, and where it is observed."""
        ends = self._ends()
        x = np.empty((table.shape[0], ends[-1]), np.float32)
        for j, column in enumerate(self.columns_):
            x[:, ends[j] : ends[j + 1]] = column.encode(table.column(j))
        return torch.from_numpy(x).to(self.device), self._spread(~table.gaps)

    def _spread(self, seen: np.ndarray) -> Tensor:
        """A mask of the columns as one of the encoded ones."""
        widths = [column.width for column in self.columns_]
        wide = seen if max(widths) == 1 else np.repeat(seen, widths, axis=1)
        return torch.from_numpy(wide).to(self.device)

    def _decoded(self, x: Tensor, table: Table) -> list[np.ndarray]:
        ends = self._ends()
        result = []
        for j, column in enumerate(self.columns_):
            rows = torch.from_numpy(np.flatnonzero(table.gaps[:, j])).to(x.device)
            result.append(column.decode(x[rows, ends[j] : ends[j + 1]].cpu().numpy()))
        return result

    def _bounds(self) -> tuple[Tensor, Tensor]:
        sides = [column.bounds for column in self.columns_]
        low, high = (
            torch.tensor([end for one in sides for end in one[k]], dtype=torch.float32)
            for k in (0, 1)
        )
        return low.to(self.device), high.to(self.device)

    # Files

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights of all networks; none before fitting."""
        return (weight for net in getattr(self, "nets_", ()) for weight in net.parameters())

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file: networks, columns, and the statement of intended use.

        It holds up to 1,000 observed values of every column, in random order.

        Raises:
            NotFittedError: there is nothing to save yet.
            FileExistsError: the file is there, and ``overwrite`` is false.
            TypeError: a category is not a text, a number or a truth value.
        """
        check_is_fitted(self, "columns_")
        params = self.get_params(deep=False)
        for name in ("net", "random_state", "bounds", "kinds", "device", "progress"):
            params.pop(name)
        header = {
            "system": SYSTEM,
            "network": {"class": "VelocityMLP" if self.net is None else "own"},
            "options": json.loads(json.dumps(params, default=_plainly)),
            "columns": [column.as_json() for column in self.columns_],
            "names": [str(name) for name in getattr(self, "feature_names_in_", ())],
            "gaps": self.gaps_.tolist(),
            "seed": self.seed_,
            "rounds": len(self.nets_),
            "history": [round_as_json(Round(**one)) for one in self.history_],
        }
        weights = {
            f"{k}.{name}": value
            for k, net in enumerate(self.nets_)
            for name, value in net.state_dict().items()
        }
        for j, donors in enumerate(self.donors_):
            weights[f"donors.{j}"] = torch.from_numpy(np.array(donors))
        use = self.use and self.use.for_system(SYSTEM, self.out_of_scope)
        save_model(path, weights, header, use=use, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path, *, network: Net | None = None) -> Self:
        """The imputer that `save` wrote, on the CPU.

        Args:
            path: of the file.
            network: what was ``net``, needed where it was not None.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not an imputer, or the weights do not fit the networks.
        """
        from fluvial.training.use import read_use

        weights, header = load_model(path, SYSTEM)
        if header["network"]["class"] == "own" and network is None:
            raise ValueError(f"{path} has networks of your own: pass network=, what was net=")
        options = dict(header["options"])
        if options["hidden"] is not None:
            options["hidden"] = tuple(options["hidden"])
        model = cls(**options, net=network, random_state=header["seed"] % 2**32)
        model.columns_ = [Column.from_json(column) for column in header["columns"]]
        model.n_features_in_ = len(model.columns_)
        if header["names"]:
            model.feature_names_in_ = np.array(header["names"], dtype=object)
        model.gaps_ = np.array(header["gaps"], bool)
        model.seed_ = header["seed"]
        model.history_ = [vars(round_from_json(one)) for one in header["history"]]
        model.donors_ = [weights.pop(f"donors.{j}").numpy() for j in range(len(model.columns_))]
        width, nets = model._ends()[-1], []
        for k in range(header["rounds"]):
            net = model._network(width, 0)
            own = {
                name.partition(".")[2]: value
                for name, value in weights.items()
                if name.startswith(f"{k}.")
            }
            put_weights(net, own, path)
            nets.append(net.eval())
        model.nets_ = nets
        model.use = read_use(path)
        return model


def _sizes(hidden: Any) -> tuple[int, ...] | None:
    """``hidden`` as a tuple; None where it is None."""
    if hidden is None:
        return None
    if not isinstance(hidden, Sequence | np.ndarray) or isinstance(hidden, str) or not len(hidden):
        raise ValueError(f"hidden must be sizes such as (128, 128), or None, got {hidden!r}")
    return tuple(whole("each of hidden", size) for size in hidden)


def _check_device(device: Any) -> None:
    try:
        if not isinstance(device, str | torch.device):
            raise ValueError("no name of a device")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        why = str(error).partition("\n")[0][:80]
        raise ValueError(f"device must be one of this machine, got {device!r}: {why}") from None


def _check_folder(folder: Any) -> None:
    """It can be made or written to: found before a round is trained, not after."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be a path, got {folder!r}")
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(f"folder: {place} is a file; choose another folder")
    if not os.access(place, os.W_OK):
        raise PermissionError(f"folder: {place} cannot be written to; choose another folder")


def _checked(net: Any, width: int) -> nn.Module:
    """A network of the user's that is a module of (n, 3 D + 1) to (n, D)."""
    if not isinstance(net, nn.Module):
        raise ValueError(f"net must make a torch.nn.Module, got {type(net).__name__}")
    weight = next(net.parameters(), None)
    device = weight.device if weight is not None and weight.device.type != "meta" else None
    try:
        with torch.no_grad():
            got = net.eval()(torch.zeros(2, 3 * width + 1, device=device))  # draws no noise
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"net must take (n, {3 * width + 1}): {why}") from error
    if tuple(got.shape) != (2, width):
        raise ValueError(f"net must give (n, {width}), got {tuple(got.shape)} of 2 rows")
    return net


def _plainly(value: Any) -> Any:
    """NumPy's numbers and arrays, as a search over parameters sets them, for JSON."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be saved: {value!r}")


def _hidden(width: int) -> tuple[int, ...]:
    size = 128 if width <= 16 else 256 if width <= 128 else 512
    return (size,) * 3


def _donors(values: np.ndarray, noise: KeyedNoise) -> np.ndarray:
    """Some of the observed values, drawn without replacement."""
    seen = values[~np.isnan(values)]
    if len(seen) > DONORS:
        order = noise.uniform(torch.empty(len(seen), dtype=torch.float64)).argsort()[:DONORS]
        seen = seen[order.numpy()]
    return np.array(seen, np.float64)


def _warn_of(rounds: Sequence[Round]) -> None:
    bad = [one.number for one in rounds if not all(map(math.isfinite, one.losses))]
    if bad:
        warnings.warn(
            f"the loss of round {bad[0]} is not finite: what it could not draw kept the values of "
            "before; take a smaller lr",
            RuntimeWarning,
            stacklevel=4,
        )
