"""Names of version 0.1.0 that have moved. Using one is an error that gives the new name."""

from __future__ import annotations

import sys
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

# Old module → new module, both below `halflife`.
MODULES = {
    "analysis.allocation_figures": "report.figures.allocation", "analysis.approximation": "theory.approximation",
    "analysis.approximation_survey": "theory.approximation_survey", "analysis.correlations": "theory.correlations",
    "analysis.decay_figures": "report.figures.decays", "analysis.decay_survey": "analysis.survey",
    "analysis.decay_values": "analysis.decays", "analysis.figures": "report.figures.comparison",
    "analysis.forecast_figures": "report.figures.forecast", "analysis.forecast_survey": "analysis.forecast.survey",
    "analysis.gate_figures": "report.figures.comparison", "analysis.koopman": "theory.koopman",
    "analysis.koopman_bounds": "theory.koopman_bounds",
    "analysis.koopman_figures": "report.figures.operators", "analysis.koopman_report": "report.tables.operators",
    "analysis.koopman_survey": "analysis.operators", "analysis.language_figures": "report.figures.language",
    "analysis.mask": "analysis.masks", "analysis.mask_figure": "report.figures.masks",
    "analysis.memory_figure": "report.figures.memory", "analysis.model_spectrum_figures": "report.figures.spectrum",
    "analysis.page_figures": "report.figures.comparison", "analysis.page_language": "report.figures.language",
    "analysis.page_plots": "report.page.plotly_renderer", "analysis.page_spectrum": "report.page.spectrum",
    "analysis.page_table": "report.page.table", "analysis.recall_grid": "report.figures.comparison",
    "analysis.redraw": "report.redraw", "analysis.report": "report.page.render",
    "analysis.report_comparison": "report.page.comparison", "analysis.report_language": "report.page.language",
    "analysis.results": "runs.folder", "analysis.ruler_figure": "report.figures.ruler",
    "analysis.spectra": "theory.spectra", "analysis.style": "report.style",
    "analysis.theory_figures": "report.figures.theory", "analysis.theory_report": "theory.compute",
    "cli.reproduce": "cli.compare", "cli.resume": "cli.options", "decay.power_law": "decay.minimax",
    "experiments.language": "experiments.train", "experiments.markdown": "report.markdown",
    "experiments.post": "experiments.mqar", "experiments.samples": "runs.samples",
    "experiments.tables": "report.tables.comparison", "layers.koopman_mlp": "layers.mlp",
    "layers.linear": "layers.init", "layers.norm": "layers.parts", "models.io": "models.checkpoint",
    "models.modifiers": "models.presets.modifiers", "models.sizes": "models.presets.sizes",
    "ops.backend": "ops.backends.dispatch", "ops.chunk_decay": "ops.chunked.decays",
    "ops.chunking": "ops.chunked.layout", "ops.fla": "ops.backends.fla", "ops.gate_decay": "ops.chunked.gate_decay",
    "ops.koopman_layout": "ops.koopman.layout", "ops.koopman_reference": "ops.koopman.reference",
    "ops.koopman_state": "ops.koopman.state", "ops.triton": "ops.backends.triton", "training.batches": "data.batches",
    "training.cache": "data.cache", "training.corpus": "data.corpus", "training.data": "data.task_stream",
    "training.documents": "data.documents", "training.hub": "data.hub", "training.language": "runs.language_run",
    "training.pool": "runs.pool", "training.run": "runs.task_run", "training.splits": "data.splits",
    "training.store": "data.store", "training.sweep": "runs.sweep", "training.text": "runs.language_run",
    "training.tokens": "data.tokenizers",
}  # fmt: skip
# Old module or class → old name in it → new name. A new name without a module stands in the same place, or in the new
# module of that place.
_NAMES_IN = {
    "analysis.decay_survey": {
        "survey": "measure_models", "checkpoints": "models.load.checkpoints", "read_ids": "data.tokenizers.read_ids",
        "pieces": "data.tokenizers.pieces", "check_vocabulary": "data.tokenizers.check_vocabulary",
        "print_wide": "report.tables.terminal.print_wide", "write_tables": "analysis.tables.write_tables",
        "table_rows": "analysis.tables.table_rows", "finite": "files.finite",
    },
    "analysis.decay_values": {
        "recording": "analysis.capture.capture", "decay_values": "measure_decays",
        "next_reset": "analysis.horizon.next_reset", "retained_energy": "analysis.horizon.retained_energy",
        "horizon": "analysis.horizon.horizon",
    },
    "analysis.figures": {
        "spectrum": "report.figures.comparison_spectrum.spectrum", "figures_of": "comparison_figures",
        "save_all": "report.redraw.save_figures", "save": "report.figures.matplotlib_renderer.save",
        "check_format": "report.figures.matplotlib_renderer.check_format",
    },
    "analysis.forecast": {
        "Reading": "analysis.forecast.ageing.SplitState", "measure": "analysis.forecast.recall.measure_recall",
        "forecast": "analysis.forecast.recall.forecast_recall",
        "check": "analysis.forecast.reading.require_linear_memory",
    },
    "analysis.forecast_survey": {
        "survey": "measure_forecasts", "octaves": "report.tables.forecast.log2_ratio",
        "errors": "report.tables.forecast.forecast_errors", "markdown": "report.tables.forecast.markdown",
        "saved": "report.tables.forecast.read_forecasts", "write": "report.tables.forecast.write_forecasts",
    },
    "analysis.koopman": {"kept": "filtered_amplitude", "state_floats": "state_size"},
    "analysis.koopman_report": {"print_table": "print_operators"},
    "analysis.koopman_survey": {"ska_layers": "analysis.capture.ska_layers", "koopman_survey": "measure_operators"},
    "analysis.language_figures": {
        "lines": "runs.folder.read_metrics", "curves": "loss", "curve": "loss", "by_lengths": "length",
        "by_length": "length",
    },
    "analysis.mask": {"head_numbers": "head_masks", "survey": "measure_masks"},
    "analysis.mask_figure": {
        "save": "report.figures.matplotlib_renderer.save_as",
        "check_suffix": "report.figures.matplotlib_renderer.check_format",
    },
    "analysis.memory_figure": {"write_tables": "report.tables.memory.write_memory"},
    "analysis.model_spectrum_figures": {"all_of": "spectrum_figures"},
    "analysis.page_language": {"lengths": "length"},
    "analysis.page_plots": {"rounded": "report.numbers.rounded", "short": "report.numbers.short_count"},
    "analysis.page_table": {"percent": "report.numbers.percent", "count": "report.numbers.count"},
    "analysis.recall_grid": {"recall_grid": "recall", "heat_map": "report.figures.matplotlib_renderer.draw_heat_map"},
    "analysis.report": {"write_report": "report.redraw.write_report"},
    "analysis.report_comparison": {"page": "comparison_page"},
    "analysis.report_language": {"page": "language_page"},
    "analysis.style": {"Look": "ModelStyle", "looks": "model_styles", "plain": "escape_formula"},
    "analysis.theory_report": {"Settings": "theory.settings.TheorySettings"},
    "cli.about": {"refusals": "report.tables.about.refusals"},
    "cli.evaluate": {
        "write": "report.tables.evaluation.write_evaluation",
        "print_table": "report.tables.evaluation.print_evaluation",
    },
    "cli.mask": {"print_table": "report.tables.masks.print_masks"},
    "cli.memory": {"print_tables": "report.tables.memory.print_memory"},
    "cli.reproduce": {"Reproduce": "Compare"},
    "cli.resume": {"only": "reject_other_options"},
    "cli.spectrum": {
        "print_decays": "report.tables.spectrum.print_decays",
        "print_spectra": "report.tables.spectrum.print_spectra", "print_heads": "report.tables.spectrum.print_heads",
    },
    "cli.theory": {"print_tables": "report.tables.theory.print_tables"},
    "cli.train": {"number": "experiments.values.parse_count", "report": "report.tables.language.print_language_run"},
    "decay.base": {
        "inverse_softplus": "precision.inverse_softplus", "inverse_softplus_of": "precision.inverse_softplus_of",
    },
    "decay.base.Decay": {
        "step": "step_size", "base_of": "decay.spectral.SpectralDecay.post_base",
        "log_rates_of": "decay.spectral.SpectralDecay.post_log_rates",
        "stretched": "decay.spectral.SpectralDecay.stretch_log_decay",
    },
    "decay.power_law": {"best_ends": "best_endpoints"},
    "evaluation.harness": {"rows": "metric_rows"},
    "evaluation.language": {"of_documents": "document_loss", "octaves": "octave_means"},
    "evaluation.memory": {
        "Size": "StateSize", "LinearSize": "StateSize", "Stored": "StateTensor",
        "one_of_each": "one_layer_of_each_kind",
        "model_size": "model_state_size", "survey": "measure_memory", "readable": "format_bytes",
    },
    "experiments.base": {"Settings": "TaskSettings"},
    "experiments.base.Experiment": {"resolve": "settings_at"},
    "experiments.compare": {
        "new": "create_comparison", "execute": "run_comparison", "summarise": "report.tables.comparison.summarise",
        "levels": "report.tables.comparison.levels",
    },
    "experiments.decay_design": {
        "Sizes": "DecayDesignSettings", "model": "variant_model", "configure": "DecayDesign.build_cell",
        "new": "experiments.compare.create_comparison", "execute": "experiments.compare.run_comparison",
        "tabulate": "DecayDesign.write_report", "setting": "describe",
    },
    "experiments.decay_findings": {"report": "losses_and_findings"},
    "experiments.language": {
        "plain": "data.corpus.CorpusConfig.to_dict", "opened": "runs.language_run.LanguageConfig.open",
        "saved": "load_config", "execute": "run_language",
    },
    "files": {"replacing": "atomic_path", "alone": "folder_lock"},
    "layers.gate_rank": {"remember": "apply_update"},
    "models.convert.files": {"read_object": "files.read_json_object"},
    "models.convert.source": {"spread": "repeat_heads"},
    "models.io": {"load_any": "models.load.load_any"},
    "models.lm.LanguageModel": {"state_floats": "state_size"},
    "models.modifiers": {
        "Sizes": "models.presets.sizes.PresetSizes", "heads": "models.presets.sizes.PresetSizes.heads",
        **{name: f"models.presets.hybrids.{name}" for name in ("ska", "attention")},
        "hybrid": "models.presets.hybrids.hybrid_layers",
    },
    "models.presets": {
        name: f"models.presets.presets.{name}" for name in (
            "mamba2", "mamba3", "rwkv7", "gated_deltanet", "deltanet", "gla", "retnet", "hgrn2", "lightnet", "tnl",
            "tnl_l", "simple", "llama", "echo",
        )
    },
    "models.sizes": {"Layout": "models.presets.modifiers.SKAPlacement"},
    "ops.chunk_decay": {"Grads": "DecayGrads"},
    "ops.chunking": {
        "Layout": "ChunkLayout", "take": "take_block", "put": "put_block", "scan": "ops.chunked.blocks.scan",
        "scan_back": "ops.chunked.blocks.scan_back", "add_product_": "ops.chunked.blocks.add_product_",
        "split_diagonal": "ops.chunked.blocks.split_diagonal",
        "unit_lower_inverse": "ops.chunked.blocks.unit_lower_inverse", "run": "ops.chunked.blocks.run",
        "Block": "ops.chunked.blocks.ChunkBlock",
    },
    "ops.koopman": {
        "Filter": "ops.koopman.readout.KoopmanReadout", "cholesky": "ops.koopman.solve.cholesky",
        "chunked": "ops.koopman.op.chunked",
    },
    "ops.koopman_layout": {"Layout": "KoopmanLayout"},
    "ops.koopman_state": {
        "KoopmanState": "KoopmanMemory", "checked": "initial_memory", "sums": "sum_tokens",
        "previous": "previous_keys", "masked": "mask_keys", "wait": "add_pending", "commit": "add_to_sums",
        "unit_of": "ops.koopman.solve.unit_of", "invert": "ops.koopman.solve.inverse_factor",
        "inverse_of": "ops.koopman.solve.cached_inverse_factor", "add_token": "ops.koopman.solve.add_token",
        "rank_one": "ops.koopman.solve.rank_one",
    },
    "ops.recurrent": {
        "compute_dtype": "precision.compute_dtype", "check_inputs": "ops.call.OpCall.check",
        "first_state": "ops.call.OpCall.first_state",
    },
    "tasks.base.Task": {"guess": "shortcut_accuracy"},
    "tasks.economy": {"moves_of": "possible_moves"},
    "tasks.groups": {"multiplication": "multiplication_table", "elements": "word_letters"},
    "tasks.layout": {"pick": "draw_index"},
    "tasks.layout.RecallTask": {"asking": "with_query"},
    "tasks.mad": {"latest": "previous_occurrence"},
    "tasks.text": {"among": "slot_mask"},
    "training.callbacks": {"Bar": "ProgressBar", "Stop": "StopOnSignal"},
    "training.checkpoints": {"sums": "checksums"},
    "training.data": {"only": "unwrap_batch"},
    "training.fit": {
        "Execution": "training.config.ExecutionConfig",
        "begin": "claim_run_folder", "Stopped": "StoppedBySignal",
    },
    "training.language": {"run": "runs.one.run_one", "of_rows": "loss_in_rows"},
    "training.pool": {"executor": "make_runner", "work": "run_job_in_worker", "Board": "ProgressBoard"},
    "training.run": {"run": "runs.one.run_one"},
    "training.splits": {"Settings": "SplitSettings"},
    "training.sweep": {"sweep": "run_sweep", "perform": "run_job", "create": "create_sweep", "Execute": "Runner"},
    "training.text": {
        "Text": "data.corpus.Corpus", "TextConfig": "LanguageConfig",
        "standard_library": "data.documents.standard_library", "run": "runs.one.run_one",
    },
    "training.trainer": {"OwnOptimizer": "HalflifeTrainer", "Sharded": "FSDPTrainer"},
}  # fmt: skip
# Old name → new name, both below `halflife`.
NAMES = {
    f"{owner}.{old}": new if new[0].islower() and "." in new else f"{MODULES.get(owner, owner)}.{new}"
    for owner, names in _NAMES_IN.items() for old, new in names.items()
}  # fmt: skip


class RenamedFinder(MetaPathFinder):
    """The first finder of `sys.meta_path`. It refuses old modules, and loads modules together with their old names."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        name = fullname.removeprefix("halflife.")
        if name == fullname:
            return None
        if name in MODULES:
            moved = (f"; {old} is now halflife.{new}" for old, new in NAMES.items() if old.startswith(f"{name}."))
            raise ModuleNotFoundError(f"{fullname} is now halflife.{MODULES[name]}{''.join(moved)}")
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for other in others if (found := other.find_spec(fullname, path, target))), None)
        if spec and spec.loader and any(f"{owner}.".startswith(f"{name}.") for owner in _NAMES_IN):
            execute = spec.loader.exec_module
            setattr(spec.loader, "exec_module", partial(_execute, execute))  # noqa: B010 (a method of the class)
        return spec


def install() -> None:
    """Answer old modules and old names with the new names, in modules loaded so far and in those loaded later."""
    if not any(type(finder).__name__ == "RenamedFinder" for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedFinder())
    for name, module in list(sys.modules.items()):
        if name.startswith("halflife."):
            _answer(module)


def _execute(execute: Any, module: ModuleType) -> None:
    execute(module)
    _answer(module)


def _answer(module: ModuleType) -> None:
    """Make a module and its classes refuse their old names."""
    place = module.__name__.removeprefix("halflife.")
    for owner, names in _NAMES_IN.items():
        if owner == place:
            vars(module)["__getattr__"] = partial(_refuse_name, place)
        elif owner.startswith(f"{place}.") and isinstance(cls := vars(module).get(owner.rpartition(".")[2]), type):
            for old, new in names.items():
                message = f"{cls.__name__}.{old} is now {new if '.' in new else f'{cls.__name__}.{new}'}"
                refuse = partial(_refuse, message)
                setattr(cls, old, property(refuse) if isinstance(vars(cls).get(new), property) else refuse)


def _refuse(message: str, *arguments: Any, **options: Any) -> NoReturn:
    raise AttributeError(message)


def _refuse_name(owner: str, name: str) -> NoReturn:
    # `from … import` hides the message of an AttributeError, so an old name gives an ImportError.
    if new := NAMES.get(f"{owner}.{name}"):
        raise ImportError(f"halflife.{owner}.{name} is now halflife.{new}")
    _refuse(f"module 'halflife.{owner}' has no attribute {name!r}")
