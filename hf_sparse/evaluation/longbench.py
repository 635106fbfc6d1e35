"""LongBench (arXiv 2308.14508) from its official .jsonl files: prompts, answer lengths, truncation and metrics as published.

Each line has `context` (prefilled), `input` (the question), `answers`, `dataset`, `all_classes` and `_id`. What the
template puts behind the context goes through the sparse decode. Nothing is downloaded.
"""
from __future__ import annotations

import os
from dataclasses import dataclass

from . import jsonl, prompt
from .generated import FreeQuestion
from .metrics import check_metric
from .samples import Sample


@dataclass(frozen=True)
class Dataset:
    """How one of LongBench's datasets is asked and scored.

    Args:
        head: the template up to the context.
        tail: the template from the end of the context on, with {input}.
        metric: a name in `metrics.METRICS`.
        max_new_tokens: of an answer.
        one_line: only the first line of an answer counts, and no chat template is used: the context is examples, and the
            answer goes on in their form.
        code: no chat template either.
    """

    head: str
    tail: str
    metric: str
    max_new_tokens: int
    one_line: bool = False
    code: bool = False


_PASSAGES = ("Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
             "The following are given passages.\n",
             "\n\nAnswer the question based on the given passages. Only give me the answer and do not output any other words."
             "\n\nQuestion: {input}\nAnswer:")
_QASPER = ("Answer the question as concisely as you can, using a single phrase or sentence if possible. If the question cannot "
           "be answered based on the information in the article, write \"unanswerable\". If the question is a yes/no "
           "question, answer \"yes\", \"no\", or \"unanswerable\". Do not provide any explanation.\n\n")
# "asconcisely" is how the published template has it.
_STORY = "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"

DATASETS = {
    "narrativeqa": Dataset(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"{_STORY}Story: ",
        f"\n\nNow, answer the question based on the story {_STORY}Question: {{input}}\n\nAnswer:", "qa_f1", 128),
    "qasper": Dataset(
        f"You are given a scientific article and a question. {_QASPER}Article: ",
        "\n\n " + _QASPER.replace("the question as", "the question based on the above article as", 1)
        + "Question: {input}\n\nAnswer:", "qa_f1", 128),
    "multifieldqa_en": Dataset(
        "Read the following text and answer briefly.\n\n",
        "\n\nNow, answer the following question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:", "qa_f1", 64),
    "multifieldqa_zh": Dataset(
        "阅读以下文字并用中文简短回答：\n\n",
        "\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：", "qa_f1_zh", 64),
    "hotpotqa": Dataset(*_PASSAGES, "qa_f1", 32),
    "2wikimqa": Dataset(*_PASSAGES, "qa_f1", 32),
    "musique": Dataset(*_PASSAGES, "qa_f1", 32),
    "dureader": Dataset(
        "请基于给定的文章回答下述问题。\n\n文章：", "\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：", "rouge_l_zh", 128),
    "gov_report": Dataset(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n",
        "\n\nNow, write a one-page summary of the report.\n\nSummary:", "rouge_l", 512),
    "qmsum": Dataset(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one or more "
        "sentences.\n\nTranscript:\n",
        "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        "rouge_l", 512),
    "multi_news": Dataset(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n",
        "\n\nNow, write a one-page summary of all the news.\n\nSummary:", "rouge_l", 512),
    "vcsum": Dataset(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n", "\n\n会议总结：", "rouge_l_zh", 512),
    "trec": Dataset(
        "Please determine the type of the question below. Here are some examples of questions.\n\n", "\n{input}",
        "classification", 64, one_line=True),
    "triviaqa": Dataset(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. The "
        "following are some examples.\n\n", "\n\n{input}", "qa_f1", 32, one_line=True),
    "samsum": Dataset(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n", "\n\n{input}",
        "rouge_l", 128, one_line=True),
    "lsht": Dataset("请判断给定新闻的类别，下面是一些例子。\n\n", "\n{input}", "classification", 64, one_line=True),
    "passage_count": Dataset(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read these "
        "paragraphs and determine how many unique paragraphs there are after removing duplicates. In other words, how many "
        "non-repeating paragraphs are there in total?\n\n",
        "\n\nPlease enter the final count of unique paragraphs after removing duplicates. The output format should only contain "
        "the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ", "count", 32),
    "passage_retrieval_en": Dataset(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract is "
        "from.\n\n",
        "\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the abstract is from. "
        "The answer format must be like \"Paragraph 1\", \"Paragraph 2\", etc.\n\nThe answer is: ", "retrieval", 32),
    "passage_retrieval_zh": Dataset(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n",
        "\n\n下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是\"段落1\"，\"段落2\"等格式\n\n答案是：",
        "retrieval_zh", 32),
    "lcc": Dataset("Please complete the code given below. \n", "Next line of code:\n", "code_similarity", 64, code=True),
    "repobench-p": Dataset(
        "Please complete the code given below. \n", "{input}Next line of code:\n", "code_similarity", 64, code=True),
}


def load(path: str | os.PathLike, tokenizer, length: int) -> list[Sample]:
    """A sample for every line, with one FreeQuestion; its `task` is "longbench/" and the dataset's name.

    A prompt of more than `length` tokens is cut in the middle, as published: its first and its last `length // 2` tokens are
    kept. As published too, the chat template of the tokenizer, if it has one, is put around it after that, except for the
    datasets of examples and of code; keep `length` below the model's context by `max_new_tokens` (512 for summaries) and by
    what the template adds.

    Args:
        path: a .jsonl file, or a directory of them. LongBench-E files are known by their dataset's name too.
        length: most tokens of a prompt.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a malformed file (naming file and line), an unknown dataset, a length that is too short, or a Chinese
            dataset without the package jieba.
    """
    if length < 64:
        raise ValueError(f"length must be at least 64 tokens, got {length}: a prompt cut to less than that is nothing but "
                         "instructions")
    samples = []
    for file in jsonl.files(path):
        for number, record in jsonl.records(file, ("input", "context", "dataset", "_id"), ("answers",)):
            try:
                samples.append(_sample(record, number, tokenizer, length))
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from error
    return samples


def _sample(record: dict, number: int, tokenizer, length: int) -> Sample:
    name = record["dataset"] if record["dataset"] in DATASETS else record["dataset"].removesuffix("_e")
    if name not in DATASETS:
        raise ValueError(f"LongBench has no dataset {name!r}; it has {', '.join(DATASETS)}")
    dataset = DATASETS[name]
    check_metric(dataset.metric)
    classes: tuple[str, ...] = ()
    if dataset.metric == "classification":
        if not isinstance(record.get("all_classes"), list) or not record["all_classes"]:
            raise ValueError(f"the key 'all_classes' must list the classes of {name!r}")
        classes = tuple(record["all_classes"])
    # Not str.format: the question may hold braces, and so may the context.
    question = dataset.tail.replace("{input}", record["input"])
    text, question = truncate(tokenizer, dataset.head + record["context"] + question, question, length)
    context, ids = prompt.split(tokenizer, text, question, chat=not (dataset.one_line or dataset.code))
    return Sample(f"longbench/{name}", number - 1, context, (FreeQuestion(
        record["_id"], ids, tuple(record["answers"]), dataset.metric, dataset.max_new_tokens,
        ("\n",) if dataset.one_line else (), classes),))


def truncate(tokenizer, text: str, question: str, length: int) -> tuple[str, str]:
    """A prompt and the question at its end, with the middle left out where it has more than `length` tokens."""
    ids = tokenizer(text)["input_ids"]
    if len(ids) <= length:
        return text, question
    half = length // 2
    head, tail = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    # Of a question that is longer than what is kept, the rest.
    return head + tail, tail[-len(question):]
