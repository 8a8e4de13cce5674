"""Every code of the linter is found where it should be, and the site's page has all of them."""

import re
from pathlib import Path

import pytest
from google.protobuf import text_format
from scripts import loaded
from text_configs import FEATURE, GOOD, PLAIN, engine_text

import penstock
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.lint import lint
from penstock.model.config.lint.findings import RULES

ROOT = Path(__file__).resolve().parents[3]

WITHOUT = PLAIN.replace("adagrad { }", "")  # an optimizer, which the settings then have
ADAM = "adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-07 %s }"
RANGE = "clipping_limits { lower { value: 0 } upper { value: %d } }"
QUANTIZED = "simulated_quantization { enabled: true num_buckets: %d " + RANGE + " }"


def parameters(text, rate="constant: 0.5"):
    """The good table with other optimization parameters."""
    return GOOD.replace("adagrad { }", text).replace("constant: 0.5", rate)


def settings(text, tables=PLAIN):
    """The good table with settings of the engine's message."""
    return engine_text(f'table {{ name: "a" {text} }}', tables)


def findings(text):
    is_engine = text.startswith("tpu_embedding")
    message = EngineConfig()
    text_format.Parse(text, message if is_engine else message.tpu_embedding_configuration)
    return lint(message)


# One configuration per code (at least), and the place of the finding.
CASES = [
    ("PS001", "mode: TRAINING", "table_descriptor"),
    ("PS002", GOOD.replace('"a"', '""'), "table_descriptor[0].name"),
    ("PS003", GOOD + GOOD.replace("mode: TRAINING", ""), "table_descriptor[1].name"),
    ("PS004", GOOD.replace("vocabulary_size: 10", ""), "table_descriptor[0].vocabulary_size"),
    ("PS005", GOOD.replace("dimension: 4", "dimension: -4"), "table_descriptor[0].dimension"),
    ("PS006", GOOD.replace("dimension", "num_features: -1 dimension"), "table_descriptor[0].num_features"),
    ("PS006", GOOD + "batch_size_per_tensor_core: -1", "batch_size_per_tensor_core"),
    ("PS007", parameters(""), "table_descriptor[0].optimization_parameters"),
    ("PS007", settings("row_wise_adagrad { }"), "…adagrad"),
    ("PS008", parameters("adagrad { }", ""), "table_descriptor[0].optimization_parameters"),
    ("PS009", parameters("adam { beta1: nan }"), "…adam.beta1"),
    ("PS009", parameters("adagrad { } weight_decay_factor: inf"), "…weight_decay_factor"),
    ("PS009", parameters("adagrad { } clipping_limits { lower { value: nan } }"), "…clipping_limits"),
    ("PS009", parameters("adagrad { }", "constant: 1e39"), "…learning_rate.constant"),
    ("PS009", settings("torch_adagrad { epsilon: nan }", WITHOUT), "table[0].torch_adagrad.epsilon"),
    ("PS025", settings("torch_adagrad { epsilon: -1 }", WITHOUT), "table[0].torch_adagrad.epsilon"),
    ("PS025", settings("partial_row_wise_adam { beta1: 1 }", WITHOUT), "table[0].partial_row_wise_adam.beta1"),
    (
        "PS018",
        settings('row_wise_adagrad { } slot { name: "accumulators" initial_value: 0 }', WITHOUT),
        "table[0].slot[0]",
    ),
    ("PS010", parameters("adagrad { }", "dynamic { tag: 1 }"), "…learning_rate.dynamic.tag"),
    ("PS010", parameters("adagrad { }", "dynamic { tag: -1 }"), "…learning_rate.dynamic.tag"),
    (
        "PS010",
        parameters("frequency_aware_adagrad { step_counter { tag: 2 } }", "dynamic { }"),
        "…frequency_aware_adagrad.step_counter.tag",
    ),
    ("PS011", GOOD + "sharding_strategy: 7", "sharding_strategy"),
    ("PS011", GOOD.replace("TRAINING", "9"), "mode"),
    ("PS011", engine_text("gate { reduction: 7 }"), "gate.reduction"),
    ("PS012", GOOD + FEATURE + "batch_size_per_tensor_core: 8", "batch_size_per_tensor_core"),
    ("PS012", GOOD.replace("dimension", "num_features: 1 dimension") + FEATURE, "table_descriptor[0].num_features"),
    ("PS013", GOOD + FEATURE.replace("input", "table_id: 3 input"), "feature_descriptor[0].table_id"),
    ("PS014", GOOD + FEATURE.replace("8", "0"), "feature_descriptor[0].input_shape"),
    ("PS014", GOOD + FEATURE.replace("input_shape: 8", ""), "feature_descriptor[0].input_shape"),
    ("PS015", engine_text('table { name: "b" }'), "table[0].name"),
    ("PS015", engine_text("feature { feature_id: 1 }", GOOD + FEATURE), "feature[0]"),
    ("PS016", engine_text('table { name: "a" } table { name: "a" }'), "table[1]"),
    ("PS016", engine_text('feature { name: "f" } feature { name: "f" }', GOOD + FEATURE), "feature[1]"),
    ("PS016", settings('slot { name: "accumulators" } slot { name: "accumulators" }'), "table[0].slot[1]"),
    ("PS017", settings("uniform { min: 1 max: 0 }"), "table[0].uniform"),
    ("PS017", settings("truncated_normal { stddev: -1 }"), "table[0].truncated_normal"),
    ("PS017", settings("initial { }"), "table[0].initial"),
    ("PS017", settings("constant { value: inf }"), "table[0].constant"),
    ("PS018", settings('slot { name: "momenta" }'), "table[0].slot[0]"),
    ("PS018", settings('slot { name: "velocities" initial_value: -1 }', parameters(ADAM % "")), "table[0].slot[0]"),
    ("PS019", engine_text('feature { name: "f" combiner: "max" }', GOOD + FEATURE), "feature[0].combiner"),
    (
        "PS019",
        engine_text('feature { name: "f" max_sequence_length: -1 }', GOOD + FEATURE),
        "feature[0].max_sequence_length",
    ),
    ("PS021", settings("dynamic { expire { clock: TIME } }"), "table[0].dynamic"),
    ("PS021", settings("dynamic { admit { min_count: 0 } }"), "table[0].dynamic"),
    ("PS022", settings("placement { where: CACHED }"), "table[0].placement.device_bytes"),
    ("PS022", settings("placement { where: CACHED device_bytes: 9 look_ahead: -1 }"), "table[0].placement.look_ahead"),
    ("PS022", settings("placement { where: HOST look_ahead: 0 }"), "table[0].placement.look_ahead"),
    ("PS023", GOOD.replace('"a"', f'"{"é" * 513}"'), "table_descriptor[0].name"),
    ("PS023", GOOD + FEATURE.replace('"f"', f'"{"f" * 1025}"'), "feature_descriptor[0].name"),
    ("PS023", engine_text(f'table {{ name: "{"a" * 1025}" }}'), "table[0].name"),
    ("PS023", engine_text(f'table {{ name: "a" slot {{ name: "{"s" * 1025}" }} }}'), "table[0].slot[0].name"),
    ("PS023", engine_text(f'feature {{ name: "{"f" * 1025}" }}', GOOD + FEATURE), "feature[0].name"),
    ("PS023", engine_text(f'feature {{ combiner: "{"c" * 1025}" }}', GOOD + FEATURE), "feature[0].combiner"),
    ("PS020", engine_text("gate { num_required: 0 }"), "gate.num_required"),
    ("PS020", engine_text("gate { max_staleness: -1 }"), "gate.max_staleness"),
    ("PS020", engine_text("gate { num_required: 2 rounds { workers: 2 } }"), "gate.num_required"),
    ("PS020", engine_text("gate { max_staleness: 2 rounds { workers: 2 } }"), "gate.max_staleness"),
    ("PS020", engine_text("gate { rounds { } }"), "gate.rounds.workers"),
    ("PS020", engine_text("gate { rounds { workers: 0 } }"), "gate.rounds.workers"),
    ("PS020", engine_text('gate { rounds { names: "a" names: "a" } }'), "gate.rounds.names"),
    ("PS020", engine_text("gate { rounds { workers: 2 ahead: 0 } }"), "gate.rounds.ahead"),
    ("PS026", settings("on_gradient: REFUSE"), "table[0].on_gradient"),
    ("PS026", settings("until_step: 5"), "table[0].until_step"),
    ("PS026", settings("trainable: false until_step: 0"), "table[0].until_step"),
    ("PS027", engine_text("clip { }"), "clip"),
    ("PS027", engine_text("clip { global_norm: 0 }"), "clip.global_norm"),
    ("PS027", engine_text("clip { row_norm: -1 }"), "clip.row_norm"),
    ("PS027", engine_text("clip { row_norm: nan }"), "clip.row_norm"),
    ("PS027", engine_text("limit { action: CLIP }"), "limit"),
    ("PS027", engine_text("limit { contributor_norm: 0.5 }"), "limit.contributor_norm"),
    ("PS024", engine_text('columns { role: "ids" name: "key" }'), "columns[0].role"),
    ("PS024", engine_text('columns { role: "id" }'), "columns[0].name"),
    ("PS024", engine_text('columns { role: "id" name: "a" } columns { role: "id" name: "b" }'), "columns[1].role"),
    ("PS023", engine_text(f'columns {{ role: "id" name: "{"k" * 1025}" }}'), "columns[0].name"),
    ("PS101", GOOD.replace("mode: TRAINING", ""), "mode"),
    ("PS102", GOOD.replace("TRAINING", "INFERENCE"), "mode"),
    (
        "PS103",
        GOOD + FEATURE + GOOD.replace('"a"', '"b"').replace("mode: TRAINING", ""),
        "table_descriptor[1]",
    ),
    ("PS104", GOOD + "batch_size_per_tensor_core: 8", "feature_descriptor"),
    ("PS105", settings("storage_dtype: INT32"), "table[0].storage_dtype"),
    ("PS106", GOOD + "num_hosts: 11", "table_descriptor[0].vocabulary_size"),
    (
        "PS107",
        GOOD.replace("TRAINING", "BACKWARD_PASS_ONLY") + "pipeline_execution_with_tensor_core: true",
        "pipeline_execution_with_tensor_core",
    ),
    ("PS201", parameters("mdl_adagrad_light { }"), "…mdl_adagrad_light"),
    ("PS201", parameters("frequency_aware_adagrad { }"), "…frequency_aware_adagrad"),
    ("PS201", parameters("user_defined_program { }"), "…user_defined_program"),
    (
        "PS202",
        parameters("adagrad { } clipping_limits { lower { value: 1 } upper { } }"),
        "…clipping_limits",
    ),
    (
        "PS203",
        parameters("adagrad { } gradient_clipping_limits { lower { value: 1 } upper { value: -1 } }"),
        "…gradient_clipping_limits",
    ),
    ("PS204", parameters("adagrad { } weight_decay_factor: 1"), "…weight_decay_factor"),
    ("PS204", parameters("adagrad { } weight_decay_factor: -0.1"), "…weight_decay_factor"),
    (
        "PS205",
        parameters("adagrad { } multiply_weight_decay_factor_by_learning_rate: true"),
        "…multiply_weight_decay_factor_by_learning_rate",
    ),
    (
        "PS206",
        parameters("adagrad { } gradient_clipping_limits { upper { } } gradient_accumulation_status: DISABLED"),
        "…gradient_accumulation_status",
    ),
    ("PS207", parameters("adagrad { }", "constant: 0"), "…learning_rate.constant"),
    ("PS207", parameters("adagrad { }", "constant: -0.5"), "…learning_rate.constant"),
    ("PS207", parameters("ftrl { lr_power: -0.5 }", "constant: 0"), "…learning_rate.constant"),
    (
        "PS208",
        parameters(ADAM % "use_non_lazy_adam: true" + " gradient_accumulation_status: DISABLED"),
        "…adam.use_non_lazy_adam",
    ),
    (
        "PS208",
        parameters("lion { use_non_lazy_lion: true } gradient_accumulation_status: DISABLED"),
        "…lion.use_non_lazy_lion",
    ),
    (
        "PS218",
        settings("dynamic { }", GOOD.replace("adagrad { }", ADAM % "use_non_lazy_adam: true")),
        "…adam.use_non_lazy_adam",
    ),
    (
        "PS219",
        engine_text(
            'table { name: "a" placement { where: CACHED device_bytes: 9 } }',
            GOOD.replace("adagrad { }", ADAM % "use_non_lazy_adam: true"),
        ),
        "…adam.use_non_lazy_adam",
    ),
    ("PS220", settings('initial { from: "vectors.parquet" }', parameters("ftrl { }")), "table[0].initial"),
    ("PS209", parameters("ftrl { allow_zero_accumulator: true }"), "…ftrl.allow_zero_accumulator"),
    ("PS209", settings('slot { name: "accumulators" initial_value: 0 }', parameters("ftrl { }")), "table[0].slot"),
    (
        "PS210",
        parameters(ADAM % "" + " low_dimensional_packing_status: ENABLED"),
        "…low_dimensional_packing_status",
    ),
    (
        "PS210",
        parameters("adagrad { } low_dimensional_packing_status: ENABLED").replace("dimension: 4", "dimension: 3"),
        "…low_dimensional_packing_status",
    ),
    ("PS211", parameters("adam { epsilon: 1e-20 use_sum_inside_sqrt: true }"), "…adam.epsilon"),
    ("PS212", parameters("adam { beta2: 1 epsilon: 1e-07 }"), "…adam.beta2"),
    ("PS212", parameters("ftrl { lr_power: 0.5 }"), "…ftrl.lr_power"),
    ("PS213", parameters("adagrad { } " + QUANTIZED % (1, 1)), "…simulated_quantization.num_buckets"),
    ("PS213", parameters("adagrad { } " + QUANTIZED % (8, 0)), "…simulated_quantization.clipping_limits"),
    ("PS214", parameters("adagrad_momentum { epsilon: 1 beta2: 1 }"), "…adagrad_momentum.exponent"),
    ("PS214", parameters("frequency_estimator { tau: 0.5 }", "dynamic { }"), "…frequency_estimator.max_delta"),
    (
        "PS215",
        parameters("adagrad { } weight_decay_factor: 0.1 gradient_accumulation_status: DISABLED"),
        "…gradient_accumulation_status",
    ),
    ("PS216", parameters("proximal_yogi { epsilon: 1 }"), "…proximal_yogi"),
    ("PS217", parameters("frequency_estimator { tau: 0.5 max_delta: 9 }"), "…learning_rate.constant"),
]


@pytest.mark.parametrize(("code", "text", "place"), CASES, ids=lambda value: value if value in RULES else "")
def test_a_code_is_found_at_its_place(code, text, place):
    place = place.replace("…", "table_descriptor[0].optimization_parameters.")
    actual = [finding for finding in findings(text) if finding.code == code]
    assert [finding.where for finding in actual] == [place]
    assert actual[0].severity == RULES[code][0]
    assert actual[0].message
    assert actual[0].fix


def test_every_code_has_a_case():
    assert {code for code, _, _ in CASES} == RULES.keys()


def test_a_good_configuration_has_no_findings():
    assert findings(GOOD) == []
    assert findings(engine_text('table { name: "a" constant { value: 1 } }', GOOD + FEATURE)) == []
    decay = "adagrad { } weight_decay_factor: 2 multiply_weight_decay_factor_by_learning_rate: true"
    assert findings(parameters(decay)) == []


def test_loading_refuses_exactly_the_codes_below_100():
    for code, text, _ in CASES:
        message = EngineConfig()
        text_format.Parse(text, message if text.startswith("tpu_") else message.tpu_embedding_configuration)
        try:
            config = EmbeddingConfig.from_proto(message)
        except penstock.ConfigError:
            assert code < "PS100", code
        else:
            assert code > "PS100", code
            assert RULES[code][0] != "error" or _cannot_be_run(config), code


def _cannot_be_run(config):
    with pytest.raises(penstock.ConfigError):
        _ = config.tables
    return True


def test_the_page_on_codes_has_the_severity_title_and_advice_of_every_code():
    rows = re.findall(r"^- \*\*(PS\d{3})\*\*, (\w+): (.+)$", loaded("docs/hooks.py").findings(), re.MULTILINE)
    assert [(code, severity) for code, severity, _ in rows] == [(code, rule[0]) for code, rule in RULES.items()]
    assert [code for code, _, text in rows if not re.fullmatch(rf"{re.escape(RULES[code][1])}\. .+\.", text)] == []


def test_the_python_of_the_page_on_configuration_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL):
        exec(compile(block, "configuration.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "['last: table_0 (8,) sqrtn', 'seq: table_0 (8, 4) sqrtn', 'u: user (8,) mean']" in printed
    assert "('table_0', 'user') 1 {'u': 2, 'clicks': [0, 1]}" in printed
    assert "(('Slot_0', 0.0),)" in printed


def test_the_settings_of_the_page_on_configuration_parse():
    (block,) = re.findall(r"```\n(# proto-message.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL)
    text_format.Parse(block.replace("{ … }", "{ }"), EngineConfig())
