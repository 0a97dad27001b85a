"""The reward plot says what its lines are."""

from marlaas_jax import plots


def test_the_plot_explains_its_lines_and_names_each_job():
    rows = {name: [{"step": i, "rollout/reward_mean": i / 4} for i in range(1, 5)] for name in ("a", "b")}
    (axes,) = plots.reward_figure(rows, title="quickstart").axes
    assert axes.get_title() == "quickstart\nthin: each batch; thick: mean of the last 3"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert len(axes.get_lines()) == 4
    (untitled,) = plots.reward_figure({}).axes
    assert untitled.get_title() == plots.EXPLANATION
