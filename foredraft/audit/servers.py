"""The audit of any server, through OpenAI's interface for completions.

A request of one token cannot be speculated. So a server is asked for a reply, and then, for places
in it, for the one token that follows the text up to there: the law that the server gives with that
token is its own plain law. Where another endpoint runs without drafts, it is asked instead.

It reports that outputs differ; the cause cannot be seen from outside.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import numpy as np

from foredraft.audit.options import AuditOptions, ServerOptions
from foredraft.audit.plain import Margins, shortened
from foredraft.audit.report import AuditReport, Finding, Level
from foredraft.audit.statistics import Drafted, LawTests, share_below, tail_bound
from foredraft.bench.prompts import load_prompts
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.models.files.progress import Progress, SilentProgress

_NUM_LIKELY, _OPENAI_LIKELY = 20, 5
"""Log probabilities requested at each position, and the number for servers that refuse so many."""
_PATH = "/v1/completions"
_WHOLE_LAW = {"min_p": 0.0, "repeat_penalty": 1.0, "repetition_penalty": 1.0}
_WAYS_TO_ASK: tuple[Mapping[str, Any], ...] = tuple(
    {"logprobs": number, **whole}
    for number in (_NUM_LIKELY, _OPENAI_LIKELY)
    for whole in ({"top_k": 0, **_WHOLE_LAW}, {"top_k": -1, **_WHOLE_LAW}, {})
)
"""Many servers apply top-k or top-p by default, while log probabilities are of the whole
distribution. The fields that switch it off differ, and some servers refuse unknown fields: the
first variant that is accepted is used."""
_REFUSED, _BUSY = (400, 422), 429
_PAUSE, _PATIENCE = 5.0, 120.0
"""Seconds until a busy server that does not say when is asked again, and of all such waits for one
answer."""
_OTHER_SEED = 1 << 32
"""Between the seeds of a reply and its probes: what a probe names must not depend on the reply."""
_BLIND_REPLIES = 5
"""Replies without token texts after which no more are requested."""
_END = ""
"""The end of a reply, as a token. Servers say it or not, and name it as they like."""
_UNSEEN = re.compile(r"<[^<>]*>|\[[A-Z]+\]|.*\ufffd.*|", re.DOTALL)
"""Names of tokens that come as no text of their own: the end, other special ones, parts of a
character."""
_MORE = "give it more --set max_requests=…, a longer --time-limit, or a larger --detect"
_NAME_ANOTHER = "the server gives no log probabilities: name a --plain-endpoint that does"
_LEAST_TOLERANCE = 0.05
"""Nats: gaps below it are near-ties on any server that is not exact to the bit."""


@dataclass(frozen=True)
class Place:
    """A token of a served reply.

    Attributes:
        token: its text; empty where the reply ends.
        last: the token before it in the reply.
        before: the whole text before it.
        num_before: tokens of that text, by the server's own count; None: it counts none.
        likely: its law there as the reply said it: log probabilities by text.
        guess: the token that followed the same two tokens, or one, earlier in the reply: what
            most drafters would have drafted.
    """

    token: str
    last: str | None
    before: str
    num_before: int | None
    likely: dict[str, float]
    guess: str | None


@dataclass(frozen=True)
class Probe:
    """The plain law at a place.

    Attributes:
        token: the one token that came; empty where the reply ends.
        likely: log probabilities by text; empty where the server gives none.
    """

    token: str
    likely: dict[str, float]

    def gap(self, token: str) -> float:
        """How far another token is behind the best one, at least, in nats."""
        unseen = [p for name, p in self.likely.items() if _UNSEEN.fullmatch(name)]
        at_most = min(self.likely.values()) if token else max(unseen or self.likely.values())
        return self.likely[self.best] - self.likely.get(token, at_most)

    @property
    def best(self) -> str:
        return max(self.likely, key=self.likely.__getitem__) if self.likely else self.token


@dataclass
class Endpoint:
    """A server.

    Args:
        http: a client with its address.
        model: the model to ask for, where a server needs its name.
        keeps: whether requests and answers are kept: a long audit makes many.

    Attributes:
        requests: made so far.
        kept: requests and answers, as evidence.
    """

    http: httpx.Client
    model: str | None = None
    keeps: bool = True
    requests: int = 0
    kept: list[dict[str, Any]] = field(default_factory=list)
    _ways: Sequence[Mapping[str, Any]] = _WAYS_TO_ASK
    _turn: Lock = field(default_factory=Lock)

    @property
    def name(self) -> str:
        return str(self.http.base_url)

    def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        """One completion.

        Raises:
            ForedraftError: the server does not answer as it should.
        """
        return self._take(*self._ask({"prompt": prompt, **options}))

    def together(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Completions of requests that are in flight at the same time, in their order.

        Raises:
            ForedraftError: the server does not answer as it should.
        """
        alone = requests[: 1 if len(self._ways) > 1 else 0]  # finds out how to ask
        choices = [self.complete(**request) for request in alone]
        with ThreadPoolExecutor(max(1, len(requests))) as pool:
            answered = pool.map(self._ask, requests[len(alone) :])
            return choices + [self._take(*each) for each in answered]

    def probe(self, place: Place, **options: Any) -> Probe | None:
        """The plain law at a place, which comes with a reply of one token; None where the server
        splits the text into other tokens."""
        choice = self.complete(place.before, max_tokens=1, **options)
        if place.num_before is not None and choice["num_prompt"] != place.num_before:
            return None
        found = choice.get("logprobs") or {}
        (token,) = found.get("tokens") or [choice["text"]]
        (near,) = found.get("top_logprobs") or [{}]
        return Probe(_END if _is_end(choice) else token, near or {})

    def _ask(self, request: Mapping[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """The number of requests it took, the last request, and its answer; on any thread."""
        named = {"model": self.model} if self.model else {}
        number = 0
        try:
            for way in self._ways:
                body = {**way, **request, **named}
                number += 1
                reply = self._post(body)
                if reply.status_code not in _REFUSED:
                    self._ways = (way,)
                    break
            reply.raise_for_status()
            answer: dict[str, Any] = reply.json()
            str(answer["choices"][0]["text"])  # it is there
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ForedraftError(f"{self.name} does not answer: {error!r}") from error
        return number, body, answer

    def _post(self, body: Mapping[str, Any]) -> httpx.Response:
        """The answer to a request. While the server is busy, one request at a time waits for it."""
        reply, waited = self.http.post(_PATH, json=body), 0.0
        if reply.status_code == _BUSY:
            with self._turn:
                while reply.status_code == _BUSY:
                    said = reply.headers.get("Retry-After", "")
                    pause = float(said) if said.isdigit() else _PAUSE
                    waited += max(1.0, pause)
                    if waited > _PATIENCE:
                        break
                    time.sleep(pause)
                    reply = self.http.post(_PATH, json=body)
        return reply

    def _take(self, number: int, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Count and record a request and its answer; returns the completion, and its prompt's
        tokens."""
        self.requests += number
        if self.keeps:
            self.kept.append({"url": self.name, "request": body, "answer": answer})
        choice: dict[str, Any] = answer["choices"][0]
        return choice | {"num_prompt": (answer.get("usage") or {}).get("prompt_tokens")}


class ServerAudit:
    """See the module docstring.

    Args:
        endpoint: the server that may speculate.
        plain: the source of its plain distribution; None: the server itself, with requests of one
            token.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        plain: Endpoint | None,
        options: AuditOptions,
        server: ServerOptions,
        progress: Progress | None = None,
    ) -> None:
        self._endpoint: Endpoint = endpoint
        self._plain: Endpoint = plain or endpoint
        self._options, self._server = options, server
        self._progress = progress or SilentProgress()
        self._random = random.Random(server.seed)
        self._prompts = [prompt.text for prompt in load_prompts(options.prompts)]
        self._ends_at = time.monotonic() + options.time_limit
        self._not_audited = 0

    def report(self) -> AuditReport:
        """Test greedy and sampled replies, and report the findings."""
        began = time.monotonic()
        try:
            levels = [self.greedy(), self.law()]
        finally:
            self._keep()
        url = self._endpoint.name
        return AuditReport(
            subject=f"The server at {url}",
            levels=levels,
            settings={
                "endpoint": url,
                "plain": self._plain.name,
                "server": asdict(self._server),
                "audit": asdict(self._options),
                "requests": self._num_requests,
                "prompts_sha256": hashlib.sha256("\0".join(self._prompts).encode()).hexdigest(),
            },
            decisive=[level.name for level in levels],
            seconds=time.monotonic() - began,
            seed=self._server.seed,
        )

    def greedy(self) -> Level:
        """Replies at temperature 0: each token against the one that comes alone."""
        self._progress.stage("Comparing greedy replies")
        gaps: list[tuple[float, Place, Probe]] = []
        noise, compared, blind = list[float](), 0, 0
        for place, probe in self._probed(0.5, temperature=0.0):
            compared += 1
            if share_below(compared, self._options.power) <= self._options.detect / 4:
                break
            if probe.token == place.token:
                with_it, alone = place.likely.get(place.token), probe.likely.get(place.token)
                if with_it is not None and alone is not None:
                    noise.append(abs(with_it - alone))
            elif not probe.likely:
                blind += 1
            else:
                gaps.append((probe.gap(place.token), place, probe))
        # A margin is between two tokens, and each has this noise.
        bound = 2.0 * tail_bound(noise, compared, self._options.alpha)
        margins = Margins(max(_LEAST_TOLERANCE, bound), compared)
        for gap, _, _ in gaps:
            margins.count(gap)
        figures = {
            **margins.figures,
            "unclassified": blind,
            "not_audited": self._not_audited,
        }
        evidence = [
            {
                "served": at.token,
                "alone": probe.token,
                "margin": gap,
                "before": at.before[-80:],
            }
            for gap, at, probe in sorted(gaps, key=lambda each: -each[0])[:10]
        ]
        below = share_below(compared, self._options.power)
        if margins.structural:
            said = f"{margins.structural} of {compared} tokens differ from those that come alone"
            return Level("greedy", Finding.DIFFERENT, said, figures, evidence)
        if blind:
            said = f"{blind} of {compared} tokens differ, and {_NAME_ANOTHER}"
            return Level("greedy", Finding.INCONCLUSIVE, said, figures)
        differ = f"{len(gaps)} differ, {margins.reach}" if gaps else "none differs"
        said = f"{compared} tokens, {differ}; {below:.1%} would be seen"
        if below > self._options.detect:
            said += f", and {self._options.detect:.1%} was asked for: {_MORE}"
            return Level("greedy", Finding.INCONCLUSIVE, said, figures, evidence)
        return Level("greedy", margins.finding, said, figures, evidence)

    def law(self) -> Level:
        """Replies at temperature 1: each token against the law that comes with a token alone."""
        self._progress.stage("Testing drawn replies")
        options, tests, blind = self._options, LawTests(self._server.seed), 0
        for place, probe in self._probed(1.0, temperature=1.0, top_p=1.0):
            if place.last is None:
                tests.begin()
            if probe.likely:
                tests.add(*_cells(place, probe))
            else:  # of an end that came alone some servers say nothing
                blind += probe.token != _END
            is_time = tests.count % 100 == 0
            if is_time and tests.detectable(options.alpha, options.power) <= options.detect:
                break
        figures = {
            "tokens": tests.count,
            "p_values": tests.p_values(),
            "shift": tests.drafted.shift,
            "not_audited": self._not_audited,
        }
        if tests.rejects(options.alpha):
            name, p = min(tests.p_values().items(), key=lambda item: item[1])
            said = f"{tests.count} tokens do not fit the plain law ({name}: p = {p:.1e})"
            return Level("law", Finding.DIFFERENT, said, figures)
        if blind or not tests.count:
            return Level("law", Finding.INCONCLUSIVE, _NAME_ANOTHER, figures)
        found = tests.detectable(options.alpha, options.power)
        said = (
            f"{tests.count} tokens fit the plain law; a shift of {found:.1%} would have been seen"
        )
        finding = Finding.SAME_LAW
        if found > options.detect:
            finding = Finding.INCONCLUSIVE
            said += f"; {options.detect:.1%} was asked for: {_MORE}"
        return Level("law", finding, said, {**figures, "detectable_shift": found})

    @property
    def _num_requests(self) -> int:
        both = {id(each): each.requests for each in (self._endpoint, self._plain)}
        return sum(both.values())

    def _probed(self, share: float, **sampling: Any) -> Iterator[tuple[Place, Probe]]:
        """Places of replies with their probes, until a share of the requests is spent."""
        most, size = int(self._server.max_requests * share), len(self._prompts)
        known = set[tuple[str, str]]()  # greedy tokens: whatever the seed, they are evidence once
        first, number, num_blind = self._num_requests, 0, 0
        while not self._is_over(most):
            at_once = min(self._server.in_flight, most - self._num_requests)
            asked = [
                {
                    "prompt": shortened(self._prompts[index % size], index // size),
                    "max_tokens": self._server.reply_tokens,
                    "seed": self._server.seed + index,
                    **sampling,
                }
                for index in range(number, number + at_once)
            ]
            for request, choice in zip(asked, self._endpoint.together(asked), strict=True):
                places = _places(request["prompt"], choice)
                number += 1
                if not places:
                    self._not_audited += 1
                    num_blind += 1
                    if num_blind == number == _BLIND_REPLIES:
                        return  # it never says what its tokens are
                for place in places:
                    if self._is_over(most):
                        return
                    if sampling["temperature"] == 0.0:
                        if (token := (place.before, place.token)) in known:
                            continue
                        known.add(token)
                    probe = self._plain.probe(place, seed=request["seed"] + _OTHER_SEED, **sampling)
                    if probe is None:
                        self._not_audited += 1
                    else:
                        yield place, probe
                    self._progress.advance((self._num_requests - first) / max(1, most - first))

    def _is_over(self, most: int) -> bool:
        """Whether the request limit or the time limit is reached."""
        return self._num_requests >= most or time.monotonic() > self._ends_at

    def _keep(self) -> None:
        """Write all requests and answers, where a file is named.

        Raises:
            ConfigError: it cannot be written.
        """
        if self._server.keep is None:
            return
        kept = self._endpoint.kept + (self._plain.kept if self._plain is not self._endpoint else [])
        try:
            lines = "".join(json.dumps(each) + "\n" for each in kept)
            Path(self._server.keep).write_text(lines, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {self._server.keep}: {error}") from error


def _places(prompt: str, choice: Mapping[str, Any]) -> list[Place]:
    """The tokens of a completion; none if the server does not list them."""
    found = choice.get("logprobs") or {}
    tokens: list[str] = [*(found.get("tokens") or ())]
    likely = [*(found.get("top_logprobs") or ())]
    if _is_end(choice):
        if "".join(tokens) == choice["text"]:
            tokens.append(_END)
        else:
            tokens[-1:] = [_END]
    if "".join(tokens) != choice["text"]:
        return []
    likely += [{}] * (len(tokens) - len(likely))
    places: list[Place] = []
    before, follows, count = prompt, dict[tuple[str, ...], str](), choice["num_prompt"]
    for index, (token, near) in enumerate(zip(tokens, likely, strict=True)):
        two, one = tuple(tokens[max(0, index - 2) : index]), tuple(tokens[index - 1 : index])
        guess = follows.get(two) or follows.get(one)
        num_before = None if count is None else count + index
        last = tokens[index - 1] if index else None
        places.append(Place(token, last, before, num_before, near or {}, guess))
        follows[two] = follows[one] = token
        before += token
    return places


def _cells(
    place: Place, probe: Probe
) -> tuple[np.ndarray[Any, Any], int, Drafted | None, int | None]:
    """A law of the tokens that are seen as text, and one more for all others.

    Then the places in it of the token, of the guess, and of the token before.

    Among the others is the end of a reply, whatever its name.
    """
    names = [name for name in probe.likely if not _UNSEEN.fullmatch(name)]
    probs = np.exp(np.array([min(0.0, probe.likely[name]) for name in names]))
    probs = np.append(probs, max(0.0, 1.0 - float(probs.sum())))
    probs /= probs.sum()
    token = names.index(place.token) if place.token in names else len(names)
    guess = names.index(place.guess) if place.guess in names else None
    if probs[token] <= 0.0:  # rounding of the log probabilities
        probs[token] = 1e-9
    last = names.index(place.last) if place.last in names else None
    return probs, token, None if guess is None else Drafted(guess), last


def _is_end(choice: Mapping[str, Any]) -> bool:
    """Whether a reply ended by itself, and not for its length."""
    return choice.get("finish_reason") == "stop"


def connect(url: str, api_key: str | None) -> httpx.Client:
    """A client of a server.

    Raises:
        ConfigError: it is no address.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no address; it begins with http:// or https://")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    address = url.rstrip("/").removesuffix("/v1")
    return httpx.Client(base_url=address, timeout=120.0, headers=headers)
