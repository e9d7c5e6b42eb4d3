# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Documents: what is generated is current, figures are those of commands, links lead somewhere, site and index render.

Pages show and link what lies in scripts/studies.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import yaml
from markdown.extensions.toc import slugify

from docs import generate, sentences
from fspo_verl.band import Band
from fspo_verl.observe import noise
from fspo_verl.output import percent

ROOT = Path(__file__).parents[1]
SITE = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *SITE]
PAGES += [*sorted((ROOT / "scripts").rglob("*.md")), *sorted((ROOT / "skills").rglob("*.md"))]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True)


def words(page: str) -> str:
    """A page below docs/, without its line breaks."""
    return " ".join((ROOT / f"docs/{page}.md").read_text().split())


def readme() -> str:
    """README.md without its line breaks."""
    return " ".join((ROOT / "README.md").read_text().split())


def bench(name: str) -> list[dict]:
    """The rows of a recorded bench."""
    return json.loads((ROOT / "scripts/bench/records.json").read_text())[name]["table"]


def links(text: str) -> list[str]:
    """Targets of Markdown links and pictures, outside code blocks."""
    return re.findall(r"\]\(([^)\s]+)\)", without_code(text))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {slugify(title.replace("`", ""), "-") for title in titles}


def test_generated_pages_and_tables_are_those_of_the_code_and_the_records():
    checked = run("scripts/docs/generate.py", "--check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files_and_headings(page):
    """mkdocs knows the pages of docs/ only."""
    missing = []
    for target in links(page.read_text()):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        found = "://" in target or (file.exists() and (not anchor or anchor in anchors(file)))
        missing += [] if found else [target]
    assert not missing


def test_no_sentence_of_a_page_is_too_long():
    for page in sentences.pages():
        counts = [(sentences.words(one), one) for one in sentences.sentences(page.read_text())]
        assert max(counts)[0] <= sentences.LONGEST, (page.name, max(counts))
        assert sum(count for count, _ in counts) / len(counts) <= sentences.AVERAGE, page.name


def test_the_site_builds_without_a_warning(tmp_path):
    built = run("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"))
    assert built.returncode == 0, built.stdout + built.stderr
    front = (tmp_path / "site/index.html").read_text()
    requests = re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="(https?://[^"]+)"', front)
    assert "Quickstart" in front and not requests  # a reader's browser asks nobody else


def description(tmp_path: Path, repository: str) -> str:
    """Return the page that the package index would show."""
    setup = (ROOT / "setup.py").read_text()
    assert setup.count('REPOSITORY = "') == 1
    (tmp_path / "setup.py").write_text(re.sub('REPOSITORY = ".*"', f'REPOSITORY = "{repository}"', setup))
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    return run("setup.py", "--quiet", "--long-description", cwd=tmp_path).stdout


@pytest.mark.parametrize("repository", ["", "https://github.com/owner/name"])
def test_the_package_index_gets_no_relative_link(repository, tmp_path):
    text = description(tmp_path, repository)
    assert "fspo-verl run" in text
    assert all(target.startswith(("https://", "#")) for target in links(text))
    assert (f"{repository}/blob/main/docs/method.md" in text) == bool(repository)
    assert (f"{repository}/raw/main/docs/" in text) == bool(repository)


def test_the_address_of_setup_py_stands_in_each_file_that_names_the_repository():
    """An empty one stands in none: the words work without it. generate.py --check compares the files themselves."""
    url = "https://github.com/owner/name"
    texts = {name: generate.addressed(name, url) for name in generate.ADDRESSED}
    assert yaml.safe_load(texts["CITATION.cff"])["repository-code"] == url
    assert yaml.safe_load(texts["mkdocs.yml"])["repo_url"] == url
    assert f"git clone {url} && cd name\npip install" in texts["README.md"]
    assert f"\nThe form is {url}/security/advisories/new.\n" in texts["SECURITY.md"]
    for name in generate.ADDRESSED:
        without = generate.addressed(name, "")
        assert url not in without and texts[name].count(url) == 1
        assert texts[name].replace(next(line for line in texts[name].splitlines(True) if url in line), "") == without


def test_a_release_is_refused_until_its_address_and_its_day_are_filled_in(tmp_path):
    workflow = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())
    check = next(step["run"] for step in workflow["jobs"]["build"]["steps"] if "CHANGELOG.md" in step.get("run", ""))
    environment = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "owner/name"}
    filled = {"setup.py": ('REPOSITORY = ""', 'REPOSITORY = "https://github.com/owner/name"')}
    filled["CHANGELOG.md"] = ("YYYY-MM-DD", "2027-01-31")

    def code(tag: str, *names: str) -> int:
        for file, (blank, value) in filled.items():
            text = (ROOT / file).read_text()
            (tmp_path / file).write_text(text.replace(blank, value) if file in names else text)
        env = os.environ | environment | {"GITHUB_REF_NAME": tag}
        return subprocess.run(["bash", "-e", "-c", check], cwd=tmp_path, env=env).returncode

    assert code("v0.1.0", *filled) == 0
    assert all(code("v0.1.0", name) for name in filled) and code("v0.1.1", *filled)


def test_versions_agree():
    namespace = {}
    exec((ROOT / "fspo_verl/__init__.py").read_text(), namespace)
    version = namespace["__version__"]
    assert f'version="{version}"' in (ROOT / "setup.py").read_text()
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()


def test_the_block_of_settings_leaves_the_loss_to_the_group():
    """A reader who pastes it trains what the group alone trains, with several optimiser steps per rollout."""
    block = yaml.safe_load(re.search(r"```yaml\n(.*?)```", (ROOT / "docs/configuration.md").read_text(), re.DOTALL)[1])
    actor = block["actor_rollout_ref"]["actor"]
    assert block["defaults"][1:] == [{"algorithm.policy_loss": "fspo"}, "_self_"]
    assert set(actor) == {"ppo_mini_batch_size"} and block["data"]["train_batch_size"] > actor["ppo_mini_batch_size"]


def test_the_range_of_the_fixed_band_is_that_of_its_option():
    option = yaml.safe_load((ROOT / "fspo_verl/configs/algorithm.policy_loss/fixed_band.yaml").read_text())
    band = option["actor_rollout_ref"]["actor"]["policy_loss"]
    high = math.expm1(band["eps_high"])
    assert -math.expm1(-band["eps_low"]) == pytest.approx(high) and f"1 +- {high:.1f}," in words("configuration")


def test_the_page_of_answers_has_the_numbers_of_its_commands():
    """docs/healthy.md: what noise clips is what a normal law says."""
    from fspo_verl.clips import CLIPS

    page = (ROOT / "docs/healthy.md").read_text()
    heads = [int(tokens.replace(",", "")) for tokens in re.findall(r"([\d,]+) tokens \|", page)]
    rows = re.findall(r"^\| (0\.\d+) \| (\w+) \| (.+) \|$", page, flags=re.MULTILINE)
    assert len(rows) == 4 and heads
    for sigma, loss, rates in rows:
        band = CLIPS[loss.lower()].band
        edges = band.low, band.high, band.dual  # one for A > 0, and two for A < 0
        laws = [(n, NormalDist(0, float(sigma) * n**0.5)) for n in heads]
        shares = [sum(1 - law.cdf(edge * band.scale_at(n)) for edge in edges) / 2 for n, law in laws]
        assert rates.split(" | ") == [f"{share:.2%}" if share < 0.01 else percent(share) for share in shares]


def test_the_page_for_users_of_gspo_leaves_cut_off_responses_out_and_has_the_numbers_of_its_ranges(monkeypatch):
    import torch
    from verl.trainer.ppo import core_algos

    page = (ROOT / "docs/coming_from_gspo.md").read_text()
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    names = {}
    exec(block, names)
    limit, reward = names["LIMIT"], torch.tensor([1.0, 0.0, 0.0, 1.0])
    mask = (torch.arange(limit) < torch.tensor([[limit], [limit - 1], [1], [7]])).float()
    given = {"token_level_rewards": reward[:, None] * mask / mask.sum(-1, keepdim=True), "response_mask": mask}
    given |= {"index": np.array(["a", "a", "b", "b"]), "config": None}
    advantages, _ = core_algos.get_adv_estimator_fn("grpo_finished")(**given)
    everyone, _ = core_algos.compute_grpo_outcome_advantage(**given)
    assert everyone[0].any() and not advantages[0].any() and torch.equal(advantages[1:], everyone[1:])
    low, high = (float(re.search(rf"{side}=(\S+?)`", page)[1]) for side in ("eps_low", "eps_high"))
    kept = [float(ratio) for ratio in re.search(r"\[(0.8), (1.28)\]", page).groups()]
    assert [math.exp(-low), math.exp(high)] == pytest.approx(kept, rel=1e-3)
    assert f"up to {math.exp(Band().high * math.sqrt(32768)):.0f}" in page and "eps 0.03" in page
    failed = re.search(r"failed in (\d+%) of small runs, GSPO in (\d+%)", words("coming_from_gspo")).groups()
    assert all(share in words("results") for share in failed)


def test_the_page_on_noise_says_what_the_recipe_says():
    """The page has the recipe's sentences, its share exp(-σ²L), and the length up to which 2.6 σ is wide enough."""
    page = words("noise")
    assert f"First {noise.SAME}, or compute log-probs in float32. {noise.PRICE}" in page
    assert f"First {noise.SAME}, or compute log-probs in float32." in " ".join((ROOT / "README.md").read_text().split())
    left = re.search(r"([\d.]+%) at σ = ([\d.]+) and ([\d,]+) tokens, ([\d.]+%) at ([\d,]+)\.", page)
    for share, tokens in (left.group(1, 3), left.group(4, 5)):
        assert share == percent(math.exp(-(float(left[2]) ** 2) * int(tokens.replace(",", ""))))
    for sigma, tokens in re.findall(r"or σ = ([\d.]+) that is ([\d,]+) tokens", page):
        longest = int(tokens.replace(",", ""))
        assert noise.Noise(float(sigma), longest).can_be_outside
        assert not noise.Noise(float(sigma), 1.01 * longest + 1).can_be_outside


def test_the_noise_that_others_quote_is_that_of_the_page_on_noise():
    page = words("noise")
    quoted = re.search(r"bf16 log-probs had ([\d.]+) .*float32 had less than ([\de-]+),", words("healthy")).groups()
    assert all(re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", page) for number in quoted)
    (on_a_cpu,) = [sigma for dtype, sigma, *_ in map(dict.values, bench("noise")) if dtype == "bf16, dynamic"]
    assert f"{on_a_cpu} with dynamic micro-batches on a CPU" in page
    sigma_8b, outside_8b = re.search(r"\| bf16, packed, dynamic \| ([\d.]+) \| (\d+%) ", page).groups()
    assert noise.BF16_SIGMA == (float(on_a_cpu), float(sigma_8b))
    assert f"before any update, {outside_8b} of the responses of a random model of 8B shape" in words("scripts")


def test_the_reasons_of_readme_stand_on_the_pages_that_it_names():
    pattern = r"log-ratio by \[(0\.\d+)\].* \[(\d+%) of responses of 200 tokens, FSPO's (\d+%)\]"
    sigma, gspo, fspo = re.search(pattern, readme()).groups()
    assert f"| {sigma} | GSPO | {gspo} |" in words("healthy") and f"| {sigma} | FSPO | {fspo} |" in words("healthy")
    points = re.search(r"([\d.]+) points of success under GSPO's shape, ([\d.]+) under FSPO's", readme()).groups()
    assert all(f"−{of_a_shape} [" in words("results") for of_a_shape in points)


def test_the_cost_of_a_step_is_the_arithmetic_that_the_page_shows():
    method = words("method")
    (ratio,) = re.findall(r"takes ([\d.]+) times what it takes with gspo", method)
    (call,) = map(float, re.findall(r"At most ([\d.]+) ms more", method))
    assert (
        f"takes {ratio} times GSPO's time, at 8B [less than {math.ceil(100 * call / 250)}% of the update]" in readme()
    )
    assert f"has 512 calls per GPU, {call * 512 / 1000:.1f} s" in method


@pytest.mark.long
def test_the_recorded_simulation_is_that_of_the_code():
    code = "import json, target_clip_rate\nprint(json.dumps(target_clip_rate.table().reset_index().to_dict('records')))"
    simulated = run("-c", code, cwd=ROOT / "scripts/bench")
    assert simulated.returncode == 0, simulated.stderr
    assert json.loads(simulated.stdout) == bench("target_clip_rate")


def test_from_which_number_of_clipped_responses_on_an_eps_finds_its_target():
    """docs/measure.md says from 0.2 a step on."""
    for responses, *rates in map(dict.values, bench("target_clip_rate")):
        for target, rate in zip((0.1, 1, 10, 25), (float(rate.split("%")[0]) for rate in rates), strict=True):
            assert (abs(rate / target - 1) < 0.05) == (int(responses) * target / 100 >= 0.2)


def test_what_the_page_on_noise_says_of_a_run():
    """A bound on the mean is more even there than a width of √L."""
    of_run = dict(row.values() for row in bench("engines"))
    mean, width = (
        [int(share.rstrip("%")) for share in of_run[f"{name}, at 10%"].split(", ")]
        for name in ("bound on the mean of the tokens", "width √L")
    )
    assert max(mean) - min(mean) < max(width) - min(width)
