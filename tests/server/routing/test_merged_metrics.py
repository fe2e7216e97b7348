"""One page of metrics for all replicas, which Prometheus can read."""

from prometheus_client.parser import text_string_to_metric_families

from server.metrics.metrics import Metrics
from server.routing.merged_metrics import merged_metrics


def samples(text: str) -> list[tuple[str, str, float]]:
    """Returns name, labels and value of every sample, in order of names and labels."""
    families = text_string_to_metric_families(text)
    return sorted((each.name, str(sorted(each.labels.items())), each.value) for f in families for each in f.samples)


def test_every_sample_is_there_with_its_replica() -> None:
    texts = {}
    for name in "ab":
        metrics = Metrics("model", with_vllm_names=True)
        metrics.on_rejection(f"reason {name}")
        texts[name] = metrics.render().decode()
    expected = []
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            for each in family.samples:
                labels = sorted({**each.labels, "replica": name}.items())
                expected.append((each.name, str(labels), each.value))
    assert samples(merged_metrics(texts)) == sorted(expected)


def test_what_belongs_to_one_metric_stands_together() -> None:
    text = '# HELP x A.\n# TYPE x counter\nx_total 1\n# HELP y B.\n# TYPE y gauge\ny{a="b c"} 2.5\n'
    assert merged_metrics({"r": text, "s": text}) == (
        '# HELP x A.\n# TYPE x counter\nx_total{replica="r"} 1\nx_total{replica="s"} 1\n'
        '# HELP y B.\n# TYPE y gauge\ny{replica="r",a="b c"} 2.5\ny{replica="s",a="b c"} 2.5\n'
    )
    assert merged_metrics({}) == ""
