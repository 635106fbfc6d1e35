"""The lm-eval harness runs a patched model unchanged: its generation tasks decode sparsely (recipe in docs/evaluation.md)."""

from __future__ import annotations

import json

import pytest

from hf_sparse import patched
from hf_sparse.evaluation import default_paragraphs
from tests.text_model import text_model, text_tokenizer

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval")

TASK = """
task: local_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}\\n\\nQuestion: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """A function that gives the harness's answers to two questions on long texts."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    text = "\n\n".join(default_paragraphs()[:8])[:1500]
    records = [{"text": text[i:], "question": f"What is {i}?", "answer": "nothing"} for i in range(2)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    (tmp_path / "task.yaml").write_text(TASK.format(path=tmp_path / "data.jsonl"), encoding="utf-8")

    def run(model):
        lm = HFLM(pretrained=model, tokenizer=text_tokenizer(), batch_size=1, max_length=2048)
        found = simple_evaluate(lm, tasks=["local_questions"], task_manager=TaskManager(include_path=str(tmp_path)),
                                bootstrap_iters=0)
        assert found["results"]["local_questions"]["exact_match,none"] == 0.0
        return [sample["resps"] for sample in found["samples"]["local_questions"]]

    return run


def test_the_harness_decodes_sparsely_and_exactly_at_threshold_one(answers):
    model = text_model()
    expected = answers(model)
    with patched(model, threshold=1.0, min_context=0, block_size=4):
        assert answers(model) == expected
        assert model.last_psa_cache.stats()["sparse_steps"] > 0
    with patched(model, threshold=0.5, min_context=0, block_size=4):
        assert answers(model) != expected
        assert 0 < model.last_psa_cache.stats()["kv_fraction"] < 1
