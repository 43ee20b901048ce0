"""The page of play.py in a real browser: what a person sees and presses, and what hostile texts cannot do."""

import json
import shutil

import pytest

from common.wording import printable
from scripts.play import PlayedModel, parse_request
from tests.chats import turn
from tests.helpers import wait_until
from tests.scripts.playground.pages import HOSTILE, played_model, serving
from tests.trainer.reporting.test_html_report import metrics_file

# Half a minute in all
pytestmark = [
    pytest.mark.skipif(not shutil.which("chromedriver"), reason="no chromedriver (apt-get install chromium-driver)"),
    pytest.mark.slow,
]


class Parrot(PlayedModel):
    """Writes pieces that were given to it, and keeps what it was asked."""

    def __init__(self, name, texts):
        real = played_model(name)
        super().__init__(name, real.model, real.tokenizer, real.encoder)
        self.texts = texts
        self.requests = []

    def write(self, request, tell, check=bool):
        self.requests.append(request)
        for text in self.texts:
            likeliest = [[printable(other), 0.1] for other in (text, *HOSTILE[:3])]
            piece = {"text": text, "tokens": [[printable(text), 0.1, likeliest], ["F0 9F", 0.97, [["F0 9F", 0.97]]]]}
            tell({**piece, "shown": printable(text)})
        tell({"text": "", "tokens": [["<|im_end|>", 0.5, [["<|im_end|>", 0.5]]]]})
        return {"reason": "end", "tokens": len(self.texts), "seconds": 0.1}


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window, driven by the system's chromedriver."""
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    # As root, and in a container
    for option in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,844"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    # A dialog is left open, so that a test can see that there is one.
    options.set_capability("unhandledPromptBehavior", "ignore")
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as driver:
        yield driver


def requested(driver):
    """The addresses that the page has asked since the last call, by the browser's own log."""
    found = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
            # That of a socket stands by itself.
            found.append(message["params"].get("request", message["params"])["url"])
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server with a model of the size of `make reference`, and a run."""
    folder = tmp_path_factory.mktemp("out")
    metrics_file(folder / "pretrain_256.metrics.jsonl", n=200)
    size = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": None}
    with serving(played_model("pretrain_256", **size), folder) as server:
        yield server


class Page:
    """The page of a server in a browser, with names for what a person does there."""

    def __init__(self, driver, server):
        self.driver = driver
        # What the pages before have left in the logs
        requested(driver)
        driver.get_log("browser")
        driver.get(server.address)
        wait_until(lambda: self.one("#model-name").text or not self.one("#no-model").get_property("hidden"))

    def one(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def set(self, name, value):
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        self.run(script, self.one(name), value)

    def write(self, text, tokens=30):
        self.set("#prompt", text)
        self.set("#max_new_tokens", tokens)
        self.one("#go").click()
        self.wait()

    def wait(self):
        wait_until(lambda: self.one("#go").is_enabled())

    def text(self):
        return self.one("#text").get_property("textContent")

    def check_that_nothing_was_obeyed(self, server):
        """No dialog, no other title, no element that our own page does not make, no other host, no complaint."""
        from selenium.common.exceptions import NoAlertPresentException

        with pytest.raises(NoAlertPresentException):
            _ = self.driver.switch_to.alert
        assert self.driver.title == "MiniMind: play"
        ours = (
            "section details summary form div p button textarea label output input span i h2 h3 b pre code figure figcaption svg line "
            "text polyline circle"
        )
        tags = "[...document.querySelectorAll('main *, #hint *')].map(e => e.tagName.toLowerCase())"
        assert set(self.run(f"return {tags}")) <= set(ours.split())
        assert len(self.all("script, style, link")) == 3
        assert not self.all("iframe, img, a, main :is([onerror], [onload], [href], [src])")
        # The browser's own first page may still be loading, with pictures of its own. Data in a URL asks no host.
        own = (server.address, "data:", "chrome://", "chrome-untrusted://")
        assert [url for url in requested(self.driver) if not url.startswith(own)] == []
        assert [entry["message"] for entry in self.driver.get_log("browser")] == []


def test_a_click_gives_text_coloured_by_probability(browser, small):
    """It is what the model writes without the page."""
    page = Page(browser, small)
    page.write("the cat", tokens=40)
    asked, pieces = {"text": "the cat", "max_new_tokens": 40}, []
    for name in ("temperature", "top_p", "seed"):
        asked[name] = json.loads(page.one(f"#{name}").get_property("value"))
    small.model.write(parse_request(json.dumps(asked).encode()), pieces.append)
    written = "".join(printable(piece["text"]) or piece["tokens"][0][0] for piece in pieces)
    assert page.text() == "the cat" + written
    levels = {name for piece in page.all(".piece") for name in piece.get_attribute("class").split()}
    assert levels & {"p3", "p4"}
    page.check_that_nothing_was_obeyed(small)


def test_a_text_is_started_and_stopped_by_keyboard(browser, small):
    from selenium.webdriver import Keys

    page = Page(browser, small)
    page.set("#max_new_tokens", 1024)
    page.one("#prompt").send_keys("the cat", Keys.CONTROL, Keys.ENTER)
    wait_until(lambda: len(page.all(".piece")) > 4)
    page.one("#prompt").send_keys(Keys.ESCAPE)
    page.wait()
    assert "stopped after" in page.one("#state").text
    wait_until(lambda: not small.model.lock.locked())


def test_a_conversation_is_kept_until_it_is_cleared(browser, tmp_path):
    parrot = Parrot("one", ["a", "b"])
    with serving(parrot, tmp_path) as server:
        page = Page(browser, server)
        page.one("#mode-chat").click()
        page.write("first")
        page.write("second")
        assert [message["content"] for message in parrot.requests[1]["messages"]] == ["first", "ab", "second"]
        page.one("#clear").click()
        page.one("#system").send_keys("Be brief.")
        page.write("third")
        assert parrot.requests[2]["messages"] == [turn("system", "Be brief."), turn("user", "third")]


def test_hostile_texts_of_people_models_and_names_are_shown(browser, tmp_path):
    """Reference: the text itself, with visible signs for what a browser would obey, and no trace of markup."""
    parrot = Parrot(HOSTILE[0] + HOSTILE[1], HOSTILE)
    with serving(parrot, tmp_path) as server:
        page = Page(browser, server)
        for number, text in enumerate(HOSTILE):
            page.write(text)
            assert parrot.requests[number]["text"] == text
        assert page.one("#model-name").text == HOSTILE[0] + HOSTILE[1]
        shown = page.text()
        for text in HOSTILE:
            assert printable(text) in shown
        for piece in page.all(".piece"):
            page.run("arguments[0].click()", piece)
        page.check_that_nothing_was_obeyed(server)
        page.one("#mode-chat").click()
        page.write(HOSTILE[0])
        page.write(HOSTILE[1])
        page.check_that_nothing_was_obeyed(server)


def test_a_run_that_trains_is_followed(browser, tmp_path):
    path = metrics_file(tmp_path / "pretrain_16.metrics.jsonl", n=10)
    with serving(None, tmp_path) as server:
        page = Page(browser, server)
        assert page.one("#panel-runs").is_displayed(), "without a model there is nothing else to see"
        wait_until(lambda: page.all("figure polyline"))
        before = page.one("figure polyline").get_attribute("points")
        with open(path, "a", encoding="utf-8") as file:
            for i in range(10, 20):
                line = {"step": i, "update": i, "tokens": 100 * i, "loss": 0.5, "eta": 3.0}
                file.write(json.dumps(line) + "\n")
            file.write('{"step": 21, "upd')
        wait_until(lambda: "updates 19" in page.one(".run").text)
        assert "training, about 3 min left" in page.one(".run").text
        wait_until(lambda: page.one("figure polyline").get_attribute("points") != before)
        assert len(page.one("figure polyline").get_attribute("points").split()) == 20
