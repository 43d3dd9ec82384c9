"""The list of systems: one row each, whether it exists yet or is planned.

The table of the README is written from here::

    python -m fluvial.catalog --write README.md
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

WINGS = (
    "images",
    "vision",
    "inverse",
    "dynamics",
    "transport",
    "tabular",
    "physics",
    "graphs",
    "chemistry",
    "language",
    "control",
    "neuroscience",
    "theory",
    "trust",
)
"""The wings, in the order in which systems are listed."""

BEGIN = "<!-- systems -->"
END = "<!-- /systems -->"


@dataclass(frozen=True, kw_only=True)
class System:
    """One method of the library.

    Attributes:
        name: how it is called everywhere: on the command line, in file names, in this table.
        wing: the package of `fluvial` it lives in.
        purpose: what it is for, in one line.
        title: the paper's title, ``None`` where it is not known.
        authors: in short, ``None`` where they are not known.
        venue: where the paper appeared.
        year: when.
        arxiv: the arXiv id, ``None`` where there is none or it is not known.
        cls: dotted path of the class; ``None`` while the system is planned.
        claim: the module that runs the paper's central claim; ``None`` while it is planned.
        recipe: dotted path of the dataclass with which `fluvial train` makes a model of a user's
            data; ``None`` for a system that is not trained on such data.
        joins: whether its models join two data sets, and take rows of one to the other, in place of
            making samples of noise: `fluvial train` wants a --target, and `fluvial translate` does
            what `fluvial sample` does for others.
        fills: whether its models fill the gaps of a table: `fluvial train` writes a filled copy
            beside the model, and there is nothing for `fluvial sample` to do.
        extra: the extra of ``pyproject.toml`` that the system needs, ``None`` if none.
    """

    name: str
    wing: str
    purpose: str
    title: str | None = None
    authors: str | None = None
    venue: str = "NeurIPS"
    year: int = 2025
    arxiv: str | None = None
    cls: str | None = None
    claim: str | None = None
    recipe: str | None = None
    joins: bool = False
    fills: bool = False
    extra: str | None = None

    @property
    def planned(self) -> bool:
        """Whether the system is still to be written."""
        return self.cls is None

    @property
    def status(self) -> str:
        """``"available"`` or ``"planned"``."""
        return "planned" if self.planned else "available"

    @property
    def citation(self) -> str:
        """Title, authors, venue and arXiv id, in one line of plain text."""
        arxiv = f"arXiv:{self.arxiv}" if self.arxiv else None
        return self._cite(self.title, arxiv)

    def load(self) -> Any:
        """The class itself.

        Raises:
            ValueError: the system is planned.
        """
        if self.cls is None:
            raise ValueError(f"{self.name!r} is planned: there is no class to load yet")
        return _named(self.cls)

    def load_recipe(self) -> Any:
        """The class of the recipe.

        Raises:
            ValueError: the system has none.
        """
        if self.recipe is None:
            raise ValueError(f"{self.name!r} has no recipe to train on other data")
        return _named(self.recipe)

    def _cite(self, title: str | None, arxiv: str | None) -> str:
        parts = [title or "title not known", self.authors, f"{self.venue} {self.year}", arxiv]
        return ", ".join(part for part in parts if part)

    @property
    def citation_markdown(self) -> str:
        """`citation` in Markdown, with a link to the paper."""
        arxiv = f"[arXiv:{self.arxiv}](https://arxiv.org/abs/{self.arxiv})" if self.arxiv else None
        return self._cite(f"*{self.title}*" if self.title else None, arxiv)


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


SYSTEMS: tuple[System, ...] = (
    System(
        name="meanflow",
        wing="images",
        purpose="images in one network call, from a model trained from scratch without a teacher",
        title="Mean Flows for One-step Generative Modeling",
        authors="Geng et al.",
        arxiv="2505.13447",
        cls="fluvial.images.meanflow.MeanFlow",
        claim="fluvial.claims.meanflow",
        recipe="fluvial.images.recipe.Recipe",
    ),
    System(
        name="representation-guidance",
        wing="images",
        purpose="training a diffusion transformer in fewer epochs, aligned with known features",
        title="Learning Diffusion Models with Flexible Representation Guidance",
        authors="Wang et al.",
        arxiv="2507.08980",
    ),
    System(
        name="locality-denoiser",
        wing="images",
        purpose="denoising and sampling without training, from the statistics of a data set",
        title="Locality in Image Diffusion Models Emerges from Data Statistics",
        authors="Lukoianov et al.",
        arxiv="2509.09672",
        cls="fluvial.images.locality.LocalityDenoiser",
        claim="fluvial.claims.locality_denoiser",
    ),
    System(
        name="pixel-perfect-depth",
        wing="vision",
        purpose="depth from one photograph, with edges that stay edges in the point cloud",
        title="Pixel-Perfect Depth with Semantics-Prompted Diffusion Transformers",
        authors="Xu et al.",
        arxiv="2510.07316",
    ),
    System(
        name="utility-augmentation",
        wing="vision",
        purpose="synthetic training images chosen by what they add to the classifier at hand",
        title="UtilGen: Utility-Centric Generative Data Augmentation with Dual-Level Task "
        "Adaptation",
        authors="Guo et al.",
        arxiv="2510.24262",
    ),
    System(
        name="system-embedded-bridge",
        wing="inverse",
        purpose="restoring a signal whose linear measurement system is known, from paired data",
        title="System-Embedded Diffusion Bridge Models",
        authors="Sobieski et al.",
        arxiv="2506.23726",
        cls="fluvial.inverse.system_embedded_bridge.SystemEmbeddedBridge",
        claim="fluvial.claims.system_embedded_bridge",
        recipe="fluvial.inverse.system_embedded_bridge.recipe.Recipe",
    ),
    System(
        name="function-space-langevin",
        wing="inverse",
        purpose="posterior samples of an unknown function, with steps that survive a finer mesh",
        title="Preconditioned Langevin Dynamics with Score-Based Generative Models for "
        "Infinite-Dimensional Linear Bayesian Inverse Problems",
        authors="Baldassari et al.",
        arxiv="2505.18276",
        cls="fluvial.inverse.function_space_langevin.FunctionSpaceLangevin",
        claim="fluvial.claims.function_space_langevin",
    ),
    System(
        name="latent-kernel-deblurring",
        wing="inverse",
        purpose="deblurring photographs whose blur is unknown and differs from place to place",
        title="DeblurDiff: Real-Word Image Deblurring with Generative Diffusion Models",
        authors="Kong et al.",
        arxiv="2502.03810",
    ),
    System(
        name="critically-damped-langevin",
        wing="dynamics",
        purpose="diffusion on position and velocity, whose smoother paths allow coarser steps",
        title="Wasserstein Convergence of Critically Damped Langevin Diffusions",
        authors="Strasman et al.",
        arxiv="2511.02419",
        cls="fluvial.dynamics.critically_damped_langevin.CriticallyDampedLangevin",
        claim="fluvial.claims.critically_damped_langevin",
    ),
    System(
        name="wasserstein-samplers",
        wing="dynamics",
        purpose="choosing a discretisation and a step count by the accuracy they guarantee",
        title="Advancing Wasserstein Convergence Analysis of Score-Based Models: Insights from "
        "Discretization and Second-Order Acceleration",
        authors="Yu and Yu",
        arxiv="2502.04849",
        cls="fluvial.dynamics.wasserstein_samplers.WassersteinSampler",
        claim="fluvial.claims.wasserstein_samplers",
    ),
    System(
        name="schrodinger-bridge-imf",
        wing="transport",
        purpose="joining two data sets by the least-action stochastic process",
        title="Exponential Convergence Guarantees for Iterative Markovian Fitting",
        authors="Gentiloni Silveri et al.",
        arxiv="2510.20871",
        cls="fluvial.transport.schrodinger_bridge.SchrodingerBridge",
        claim="fluvial.claims.schrodinger_bridge_imf",
        recipe="fluvial.transport.schrodinger_bridge.recipe.Recipe",
        joins=True,
    ),
    System(
        name="semidual-ot-maps",
        wing="transport",
        purpose="an optimal transport map from samples, with an error budget that can be computed",
    ),
    System(
        name="miri-imputation",
        wing="tabular",
        purpose="completing a table with holes so that its joint distribution is right",
        title="Missing Data Imputation by Reducing Mutual Information with Rectified Flows",
        authors="Yu et al.",
        arxiv="2505.11749",
        cls="fluvial.tabular.MIRIImputer",
        claim="fluvial.claims.miri_imputation",
        recipe="fluvial.tabular.miri.recipe.Recipe",
        fills=True,
        extra="tabular",
    ),
    System(
        name="physics-constrained-flow",
        wing="physics",
        purpose="samples of a trained PDE model that satisfy a constraint to machine precision",
        title="Physics-Constrained Flow Matching: Sampling Generative Models with Hard Constraints",
        authors="Utkarsh et al.",
        arxiv="2506.04171",
        cls="fluvial.physics.physics_constrained_flow.PhysicsConstrainedFlow",
        claim="fluvial.claims.physics_constrained_flow",
    ),
    System(
        name="autohood3d",
        wing="physics",
        purpose="deformation and force of a car hood during painting, learned from simulations",
        title="AutoHood3D: A Multi-Modal Benchmark for Automotive Hood Design and "
        "Fluid-Structure Interaction",
        authors="Sharma et al.",
        venue="NeurIPS Datasets and Benchmarks",
        arxiv="2511.05596",
    ),
    System(
        name="graph-pattern-machine",
        wing="graphs",
        purpose="pre-training a plain transformer on unlabelled graphs, for a small head later",
        title="Generative Graph Pattern Machine",
        authors="Wang et al.",
        arxiv="2505.16130",
    ),
    System(
        name="treegen-hierarchies",
        wing="graphs",
        purpose="the distribution of binary trees over given leaves: jet histories, clusterings",
        title="TreeGen",
    ),
    System(
        name="dycc-graph-pretraining",
        wing="chemistry",
        purpose="pre-training a molecular graph encoder before fine-tuning on small assays",
        title="Dynamic and Chemical Constraints to Enhance the Molecular Masked Graph Autoencoders",
    ),
    System(
        name="griddd-graph-diffusion",
        wing="chemistry",
        purpose="molecules with a target property, of a size the sampler chooses",
        title="Graph Diffusion that can Insert and Delete",
        authors="Ninniri et al.",
        arxiv="2506.15725",
    ),
    System(
        name="retro-synflow",
        wing="chemistry",
        purpose="a ranked list of reactants that would give a wanted product",
        title="RETRO SYNFLOW: Discrete Flow Matching for Accurate and Diverse Single-Step "
        "Retrosynthesis",
        authors="Yadav et al.",
        arxiv="2506.04439",
    ),
    System(
        name="cbyg-drug-design",
        wing="chemistry",
        purpose="ligands for a protein pocket, guided to affinity, synthesis and selectivity",
        title="Controllable 3D Molecular Generation for Structure-Based Drug Design Through "
        "Bayesian Flow Networks and Gradient Integration",
        authors="Choi et al.",
        arxiv="2508.21468",
    ),
    System(
        name="caddi-discrete-diffusion",
        wing="language",
        purpose="text that a causal transformer generates, revises and fills in by diffusion",
        title="Non-Markovian Discrete Diffusion with Causal Language Models",
        authors="Zhang et al.",
        arxiv="2502.09767",
        cls="fluvial.language.caddi.CaDDi",
        claim="fluvial.claims.caddi_discrete_diffusion",
        recipe="fluvial.language.caddi.recipe.Recipe",
    ),
    System(
        name="saemark-watermark",
        wing="language",
        purpose="telling whose key produced a text, without touching a token or a logit",
        title="SAEMark: Steering Personalized Multilingual LLM Watermarks with Sparse Autoencoders",
        authors="Yu et al.",
        arxiv="2508.08211",
    ),
    System(
        name="specem-ensemble",
        wing="language",
        purpose="one answer from several language models with different vocabularies",
        title="SpecEM: Training-Free LLM Ensembling via Iterative Drafting, Verification, and "
        "Online Feedback",
        authors="Lv et al.",
        arxiv="2412.07380",
    ),
    System(
        name="multiverse-parallel",
        wing="language",
        purpose="a language model that splits its output into parallel branches and merges them",
        title="Multiverse: Your Language Models Secretly Decide How to Parallelize and Merge "
        "Generation",
        authors="Yang et al.",
        arxiv="2506.09991",
    ),
    System(
        name="skipv1former",
        wing="language",
        purpose="a decoder with a smaller key/value cache and lower perplexity",
        title="Improving Model Representation and Reducing KV Cache via Skip Connections with "
        "First Value Heads",
        authors="Wu et al.",
        arxiv="2510.16807",
    ),
    System(
        name="sorl-offline-rl",
        wing="control",
        purpose="a policy from logged transitions, with more compute at test time where it pays",
        title="Scaling Offline RL via Efficient and Expressive Shortcut Models",
        authors="Espinosa-Dice et al.",
        arxiv="2505.22866",
    ),
    System(
        name="diverse-actor-critic",
        wing="control",
        purpose="continuous control that keeps several ways to act",
        title="Learning Intractable Multimodal Policies with Reparameterization and Diversity "
        "Regularization",
        authors="Wang et al.",
        arxiv="2511.01374",
    ),
    System(
        name="counteractive-rl",
        wing="control",
        purpose="exploration for value-based learners with few environment steps",
        title="Counteractive RL: Rethinking Core Principles for Efficient and Scalable Deep "
        "Reinforcement Learning",
        authors="Korkmaz",
        arxiv="2603.15871",
    ),
    System(
        name="autonomous-rl-rsa",
        wing="control",
        purpose="learning goals with almost no manual resets, where some states are irreversible",
        title="Robust and Scalable Autonomous Reinforcement Learning in Irreversible Environments",
        authors="Lee",
    ),
    System(
        name="serial-dependence-cann",
        wing="neuroscience",
        purpose="simulating how the previous stimulus repels or attracts the present percept",
        title="Neural Correlates of Serial Dependence: Synaptic Short-term Plasticity "
        "Orchestrates Repulsion and Attraction",
        authors="Zhang et al.",
    ),
    System(
        name="score-estimation-rates",
        wing="theory",
        purpose="how well a score can be learned from n samples with sub-Gaussian tails",
        title="Approximation and Generalization Abilities of Score-based Neural Network "
        "Generative Models for Sub-Gaussian Distributions",
        authors="Fu and Lee",
        arxiv="2505.10880",
    ),
    System(
        name="spiked-gradient-structure",
        wing="theory",
        purpose="measuring which low-rank parts dominate a first layer's gradient, and why",
        title="Low Rank Gradients and Where to Find Them",
        authors="Sonthalia et al.",
        arxiv="2510.01303",
    ),
    System(
        name="transformer-isolation-continuity",
        wing="theory",
        purpose="telling a failure of training from one of architecture on long simple patterns",
        title="Continuity and Isolation Lead to Doubts or Dilemmas in Large Language Models",
        authors="Pasten et al.",
        arxiv="2505.10606",
    ),
    System(
        name="conformal-masks",
        wing="trust",
        purpose="a mask of the pixels of a restored image to trust, with a finite-sample guarantee",
        title="Image Super-Resolution with Guarantees via Conformalized Generative Models",
        authors="Adame et al.",
        arxiv="2502.09664",
        cls="fluvial.trust.conformal_masks.RestorationFlow",
        claim="fluvial.claims.conformal_masks",
        recipe="fluvial.trust.conformal_masks.recipe.Recipe",
    ),
    System(
        name="component-attribution",
        wing="trust",
        purpose="finding, erasing or amplifying a concept in a trained generator, without training",
        title="Unveiling Concept Attribution in Diffusion Models",
        authors="Nguyen et al.",
        arxiv="2412.02542",
    ),
    System(
        name="rectified-flow-memorization",
        wing="trust",
        purpose="telling whether a flow trained on pairs has memorised the pairing",
        title="Gradient Variance Reveals Failure Modes in Flow-Based Generative Models",
        authors="Reu et al.",
        arxiv="2510.18118",
        cls="fluvial.trust.rectified_flow_memorization.PairedFlow",
        claim="fluvial.claims.rectified_flow_memorization",
    ),
    System(
        name="weapons-position",
        wing="trust",
        purpose="a statement of intended use and a measured reliability report for any model",
        title="Prohibiting Generative AI in any Form of Weapon Control",
        authors="Cummings",
        venue="NeurIPS position papers",
    ),
)


def get(name: str) -> System:
    """The system of that name.

    Raises:
        ValueError: there is none; the message names those that are spelled alike.
    """
    for system in SYSTEMS:
        if system.name == name:
            return system
    near = get_close_matches(name, [system.name for system in SYSTEMS])
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
    raise ValueError(f"there is no system {name!r}{hint} `fluvial list` shows all")


def available() -> tuple[System, ...]:
    """The systems that exist."""
    return tuple(system for system in SYSTEMS if not system.planned)


def markdown_table(systems: Iterable[System] = SYSTEMS) -> str:
    """The systems as a Markdown table, without a newline at the end."""
    rows = ["| system | wing | what it is for | paper | status |", "|---|---|---|---|---|"]
    for s in systems:
        cells = (f"`{s.name}`", s.wing, s.purpose, s.citation_markdown, s.status)
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """``text`` with the present table between its two markers.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected {BEGIN} and {END} once each and in this order")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{markdown_table()}\n{END}{after}"


def write_table(path: Path) -> None:
    """Refresh the table in the file ``path``, which is replaced as a whole or not touched.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it does not hold the two markers.
    """
    path = path.resolve()
    text = with_table(path.read_text(encoding="utf-8"))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, path.stat().st_mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, or write it into a file: ``python -m fluvial.catalog --write README.md``."""
    parser = argparse.ArgumentParser(prog="python -m fluvial.catalog", description=main.__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="refresh the table in this file")
    path: Path | None = parser.parse_args(argv).write
    if path is None:
        print(markdown_table())
        return
    try:
        write_table(path)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {path}: {error}\n")


if __name__ == "__main__":
    main()
