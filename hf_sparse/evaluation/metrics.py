"""Scores of generated answers, as LongBench and RULER publish them, and exact binomial intervals of an accuracy.

Each metric is that of the benchmark's own scripts, with their quirks, so that figures can be compared with published ones.
All of them are 0 to 1.
"""
from __future__ import annotations

import difflib
import importlib.util
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_PUNCTUATION_ZH = ("！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"
                   "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.")
_DROP = str.maketrans("", "", string.punctuation)
_DROP_ZH = str.maketrans("", "", string.punctuation + _PUNCTUATION_ZH)
CHINESE = ("qa_f1_zh", "rouge_l_zh")                        # metrics of words in a language that doesn't part them


def score(metric: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """How good a generated answer is, 0 to 1.

    Args:
        metric: a name in METRICS.
        references: the gold answers; at least one. The best counts, except for "string_match_all", which is the share of
            them that the prediction holds.
        classes: all classes, for metric "classification".

    Raises:
        ValueError: an unknown metric, no reference, or a metric of Chinese text without the package jieba.
    """
    check_metric(metric)
    if not references:
        raise ValueError("there is no gold answer to compare with")
    if metric == "string_match_all":
        return sum(string_match(prediction, r) for r in references) / len(references)
    if metric == "classification":
        return max(classification(prediction, r, classes) for r in references)
    return max(METRICS[metric](prediction, r) for r in references)


def check_metric(metric: str) -> None:
    """Raise ValueError for a metric that is not there, or can't be computed here."""
    if metric not in METRICS:
        raise ValueError(f"there is no metric {metric!r}; choose from {', '.join(METRICS)}")
    if metric in CHINESE and importlib.util.find_spec("jieba") is None:
        raise ValueError(f"the metric {metric!r} counts Chinese words as the package jieba parts them; install it "
                         "(pip install jieba), or leave out the Chinese datasets")


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of the words that both have, without case, punctuation and articles."""
    return _f1(_plain_words(prediction), _plain_words(reference))


def qa_f1_zh(prediction: str, reference: str) -> float:
    """The same for Chinese."""
    plain = [["".join(word.lower().translate(_DROP_ZH).split()) for word in _words_zh(text)]
             for text in (prediction, reference)]
    return _f1(*([word for word in words if word] for words in plain))


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F1 as the package `rouge` computes it: by sentences, and of sets of words.

    A word counts when it is in the longest common subsequence of any two sentences.
    """
    ours, theirs = _sentences(prediction), _sentences(reference)
    if not ours or not theirs:
        return 0.0
    common = {word for one in theirs for other in ours for word in _common_subsequence(one, other)}
    precision = len(common) / len({word for sentence in ours for word in sentence})
    recall = len(common) / len({word for sentence in theirs for word in sentence})
    return 2.0 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(prediction: str, reference: str) -> float:
    """The same for Chinese."""
    return rouge_l(" ".join(_words_zh(prediction)), " ".join(_words_zh(reference)))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """One over the number of classes that are named, if the right one is among them."""
    named, examine = [], True
    for name in (name for name in classes if name in prediction):
        # A class whose name is part of the right one's was not meant. The published script removes it from the list that
        # it walks, and so never looks at the one behind it.
        examine = not (examine and name in reference and name != reference)
        if examine:
            named.append(name)
    return 1.0 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Share of the numbers in the prediction that are the paragraph's."""
    return _number_share(prediction, _paragraph(reference, r"Paragraph (\d+)"))


def retrieval_zh(prediction: str, reference: str) -> float:
    """The same for Chinese."""
    return _number_share(prediction, _paragraph(reference, r"段落(\d+)"))


def count(prediction: str, reference: str) -> float:
    """Share of the numbers in the prediction that are right."""
    return _number_share(prediction, reference)


def code_similarity(prediction: str, reference: str) -> float:
    """Similarity of the first line that is code, to whole percents."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def string_match(prediction: str, reference: str) -> float:
    """Whether the prediction holds the reference, upper or lower case."""
    return float(reference.lower() in prediction.lower())


METRICS: dict[str, Callable] = {
    "qa_f1": qa_f1, "qa_f1_zh": qa_f1_zh, "rouge_l": rouge_l, "rouge_l_zh": rouge_l_zh, "classification": classification,
    "retrieval": retrieval, "retrieval_zh": retrieval_zh, "count": count, "code_similarity": code_similarity,
    "string_match_all": string_match, "string_match_part": string_match,
}


def binomial_interval(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Exact (Clopper-Pearson) confidence interval of a success probability: (low, high), to 1e-9.

    No trials give (0.0, 1.0).

    Raises:
        ValueError: successes outside of 0 to trials, or a level outside of (0, 1).
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must be between 0 and the trials ({trials}), got {successes}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    tail = (1.0 - level) / 2.0
    # By symmetry the upper bound of k is one minus the lower bound of the failures.
    low = _lower_bound(successes, trials, tail)
    high = 1.0 - _lower_bound(trials - successes, trials, tail)
    return low, high


def _lower_bound(successes: int, trials: int, tail: float) -> float:
    """The probability at which `successes` or more come up with probability `tail`."""
    if successes == 0:
        return 0.0
    logs = [math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
            for k in range(successes, trials + 1)]
    below, above = 0.0, 1.0
    for _ in range(50):
        middle = (below + above) / 2.0
        yes, no = math.log(middle), math.log1p(-middle)
        terms = (log + k * yes + (trials - k) * no for k, log in enumerate(logs, start=successes))
        if math.fsum(map(math.exp, terms)) < tail:
            below = middle
        else:
            above = middle
    return (below + above) / 2.0


def _f1(prediction: list[str], reference: list[str]) -> float:
    same = sum((Counter(prediction) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def _plain_words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_DROP)).split()


def _words_zh(text: str) -> list[str]:
    import jieba

    return list(jieba.cut(text, cut_all=False))


def _sentences(text: str) -> list[list[str]]:
    """Words of each sentence; what is nothing but space between two full stops is a sentence of one empty word."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(a: list[str], b: list[str]) -> list[str]:
    """A longest common subsequence of two lists of words; of several, the one that the package `rouge` finds."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, word in enumerate(a, start=1):
        for j, other in enumerate(b, start=1):
            lengths[i][j] = (lengths[i - 1][j - 1] + 1 if word == other
                             else max(lengths[i - 1][j], lengths[i][j - 1]))
    found, i, j = [], len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            i, j = i - 1, j - 1
            found.append(a[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _paragraph(reference: str, pattern: str) -> str:
    found = re.search(pattern, reference)
    if found is None:
        raise ValueError(f"a gold answer of paragraph retrieval must name a paragraph by its number, got {reference!r}")
    return found[1]


def _number_share(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return sum(number == wanted for number in numbers) / len(numbers) if numbers else 0.0
