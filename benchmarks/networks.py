"""What the networks cost: beside their peers, with gradient checkpointing, with a key-value cache.

    python benchmarks/networks.py [--threads N] [--repeats N]

Needs diffusers and transformers (fluvial[vision]) for the peers. Contestants take turns within one
run, so that a busy machine slows all of them; numbers are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.core.noise import KeyedNoise
from fluvial.networks import CausalTransformer, DiT, UNet

NOISE = KeyedNoise(0)


def medians(contestants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds a call, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(repeats + 1):
        for name, contestant in contestants.items():
            start = time.perf_counter()
            contestant()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def show(title: str, times: dict[str, float]) -> None:
    first = next(iter(times.values()))
    parts = (f"{name} {1e3 * t:.1f} ms ({t / first:.2f}x)" for name, t in times.items())
    print(f"{title}: {'; '.join(parts)}", flush=True)


def training(network: nn.Module, call: Callable[[], Tensor]) -> Callable[[], None]:
    def step() -> None:
        network.zero_grad(set_to_none=True)
        call().square().mean().backward()

    return step


def size(network: nn.Module) -> str:
    return f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M"


def unets(repeats: int) -> None:
    """The same layout in both: 3 levels of 2 blocks, attention at the lowest."""
    from diffusers import UNet2DModel

    ours = UNet(
        size=32, channels=3, width=64, multipliers=(1, 2, 2), blocks=2, attention=(8,), heads=8
    )
    theirs = UNet2DModel(
        sample_size=32,
        block_out_channels=(64, 128, 128),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        attention_head_dim=16,
        resnet_time_scale_shift="scale_shift",
        downsample_type="resnet",
        upsample_type="resnet",
    )
    x, t = NOISE.normal(torch.empty(8, 3, 32, 32)), torch.full((8,), 0.5)
    names = f"fluvial ({size(ours)})", f"diffusers ({size(theirs)})"
    calls = (lambda: ours(x, t)), (lambda: theirs(x, 999 * t).sample)
    with torch.no_grad():
        times = medians(dict(zip(names, calls, strict=True)), repeats)
        show("U-Net, 8 x 3 x 32 x 32, forward", times)
    steps = training(ours, calls[0]), training(theirs, calls[1])
    show("U-Net, forward and backward", medians(dict(zip(names, steps, strict=True)), repeats))


def activations(call: Callable[[], Tensor]) -> float:
    """MiB that the graph of a call keeps, each storage once, without the weights."""
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        if not isinstance(value, nn.Parameter) and not value.is_leaf:
            storage = value.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        out = call()
    del out
    return sum(kept.values()) / 2**20


def checkpointing(repeats: int) -> None:
    x, t = NOISE.normal(torch.empty(16, 4, 32, 32)), torch.full((16,), 0.5)
    tokens = torch.arange(16 * 256).reshape(16, 256) % 100
    cases: dict[str, tuple[Any, Callable[[], Tensor]]] = {}
    dit = DiT(size=32, channels=4, patch=2, width=192, depth=6, heads=3)
    cases["DiT, 256 tokens, 6 blocks"] = dit, lambda: dit(x, t)
    unet = UNet(size=32, channels=4, width=32)
    cases["U-Net, 32 x 32"] = unet, lambda: unet(x, t)
    causal = CausalTransformer(vocabulary=100, width=192, depth=6, heads=3)
    cases["causal, 256 tokens, 6 blocks"] = causal, lambda: causal(tokens)
    for name, (network, call) in cases.items():
        memory: dict[bool, float] = {}
        steps: dict[str, Callable[[], None]] = {}
        for again in (False, True):

            def run(again: bool = again, network: Any = network, call: Any = call) -> Tensor:
                network.checkpoint = again
                return call()

            memory[again] = activations(run)
            steps["recomputed" if again else "kept"] = training(network, run)
        show(f"{name}, a training step", medians(steps, repeats))
        print(f"  activations: kept {memory[False]:.0f} MiB, recomputed {memory[True]:.0f} MiB")


@torch.no_grad()
def decoding(repeats: int, length: int = 128) -> None:
    """Greedy decoding of one row after another, from a prompt of 16 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    network = CausalTransformer(
        vocabulary=1000, width=256, depth=6, heads=8, kv_heads=2, mlp_ratio=2.75
    )
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
        )
    ).eval()
    prompt = torch.arange(4 * 16).reshape(4, 16)

    def cached() -> Tensor:
        x, cache = prompt, {}
        logits, cache = network(x, cache=cache)
        for _ in range(length):
            token = logits[:, -1:].argmax(-1)
            x = torch.cat([x, token], 1)
            logits, cache = network(token, cache=cache)
        return x

    def whole() -> Tensor:
        x = prompt
        for _ in range(length):
            x = torch.cat([x, network(x)[:, -1:].argmax(-1)], 1)
        return x

    def theirs() -> Tensor:
        out = peer(prompt, use_cache=True)
        x = prompt
        for _ in range(length):
            token = out.logits[:, -1:].argmax(-1)
            x = torch.cat([x, token], 1)
            out = peer(token, past_key_values=out.past_key_values, use_cache=True)
        return x

    assert torch.equal(cached(), whole())
    names = f"with a cache ({size(network)})", "without", f"Llama of transformers ({size(peer)})"
    contestants = dict(zip(names, (cached, whole, theirs), strict=True))
    show(f"causal, 4 rows, {length} tokens after 16", medians(contestants, repeats))


@torch.no_grad()
def adapter(repeats: int, steps: int = 50) -> None:
    """Steps of DDIM with a model of diffusers that computes nothing: what is around it."""
    from diffusers import DDIMScheduler, UNet2DModel

    from fluvial.adapters import from_diffusers
    from fluvial.core.gaussian.multistep import DDIM
    from fluvial.core.simulate import simulate

    class Nothing(UNet2DModel):
        def forward(self, sample: Any, timestep: Any, *_: Any, **__: Any) -> Any:
            return (sample,)

    model = Nothing(
        block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    )
    scheduler = DDIMScheduler(clip_sample=False)
    field, path, grid, steer = from_diffusers(model, scheduler)
    x, pairs = NOISE.normal(torch.empty(4, 3, 32, 32)), grid(steps)
    scheduler.set_timesteps(steps)

    def ours() -> Any:
        return simulate(x, pairs, DDIM(), path, field, NOISE, steer)

    def theirs() -> Any:
        z = x
        for t in scheduler.timesteps:
            z = scheduler.step(model(z, t)[0], t, z).prev_sample
        return z

    assert (ours() - theirs()).abs().max() < 1e-3
    show(
        f"DDIM, {steps} steps around nothing",
        medians({"fluvial": ours, "diffusers": theirs}, repeats),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, float32, {options.threads} thread(s)")
    for part in (unets, checkpointing, decoding, adapter):
        part(options.repeats)


if __name__ == "__main__":
    main()
