"""A cluster of workers and the router before it, as a simulation of discrete events.

A worker follows the scheduler of crates/metal-attention/src/scheduler: admission and pages (`admission.rs`, `sequence_pool.rs`),
the tokens of a step (`step.rs`, `batch_sizer.rs`), prefixes shared and finished texts kept. Behind a router all requests come from
one address, so that there is one client and nobody gives way to another. How long a step takes is measured elsewhere and
given (`StepTime`).

A text is a list of segments, each a key and a number of tokens: texts have in common what their first segments have.
"""

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field

PAGE = 64
# Tokens of prompts that a step takes in any case, and how long one may take (`batch_sizer.rs`).
LEAST, STEP = 16, 0.1
# Tokens that a text waits for while another one evaluates them (`admission.rs`).
WORTH_WAITING = 16
LOOK_AHEAD = 32


def pages_of(n_tokens):
    return -(-n_tokens // PAGE)


def n_tokens(segments):
    return sum(n for _, n in segments)


def n_common(a, b, limit_b=None):
    """Tokens that two lists of segments have in common, of `b` the first so many."""
    common = 0
    for (key, n), (other, m) in zip(a, b):
        if key != other:
            break
        common += min(n, m)
        if n != m:
            break
    return common if limit_b is None else min(common, limit_b)


@dataclass
class StepTime:
    """Seconds of a step: so many for each step, each token of a prompt, each text that gets its next token, each thousand
    positions that these attend to, and each thousand that tokens of prompts attend to, many of which are read once for all; and
    for each request that begins, which the worker's processors are as busy with as with a model that runs on them. Steps with
    prompts take longer or shorter by one of the factors of `spread`."""

    fixed: float
    prompt: float
    decode: float
    context: float = 0.0
    prompt_context: float = 0.0
    request: float = 0.0
    spread: tuple = (1.0,)

    def of(self, step, chance):
        return self.usual(step) * (chance.choice(self.spread) if step.n_prompt else 1.0)

    def usual(self, step):
        model = self.fixed + self.prompt * step.n_prompt + self.decode * step.n_decode
        attention = self.context * step.positions + self.prompt_context * step.prompt_positions
        return model + attention / 1000 + self.request * step.n_begin


@dataclass
class Step:
    """What a step consists of: tokens of prompts, texts that get their next token, positions that either attend to, and
    requests that begin."""

    n_prompt: int = 0
    n_decode: int = 0
    positions: float = 0.0
    prompt_positions: float = 0.0
    n_begin: int = 0


@dataclass
class Options:
    """Those of `serve`: texts that run at once, tokens that each has room for, tokens of a step, texts that may wait; and the
    finished texts that are kept beside them, as long as there are pages."""

    parallel: int = 16
    context: int = 2048
    batch: int = 512
    queue: int = 256
    kept: int = 64

    @property
    def sequences(self):
        return self.parallel + self.kept

    @property
    def pages(self):
        return self.parallel * pages_of(self.context)


@dataclass(eq=False)
class Request:
    """A prompt and how many tokens its answer gets. What happens to it is told to `on_first` and `on_end`."""

    prompt: list
    answer: tuple
    on_first: object = None
    on_end: object = None
    sent: float = 0.0
    first: float = None
    end: float = None
    cached: int = 0
    refused: bool = False

    @property
    def n_prompt(self):
        return n_tokens(self.prompt)


class Pages:
    """The KV cache: pages that sequences share."""

    def __init__(self, total):
        self.free, self.uses, self.names = total, {}, itertools.count()

    def new(self):
        self.free -= 1
        page = next(self.names)
        self.uses[page] = 1
        return page

    def share(self, page):
        self.uses[page] += 1
        return page

    def give_back(self, page):
        self.uses[page] -= 1
        if not self.uses[page]:
            del self.uses[page]
            self.free += 1


@dataclass(eq=False)
class Sequence:
    """What a place in the KV cache holds: the first `n` tokens of `segments`."""

    segments: list = field(default_factory=list)
    n: int = 0
    pages: list = field(default_factory=list)
    state: str = "empty"
    used: int = 0


@dataclass(eq=False)
class Text:
    request: Request
    number: int
    segments: list
    total: int
    seq: Sequence = None
    generated: int = 0
    begun: bool = False

    @property
    def waiting(self):
        return self.total - self.seq.n


class Pace:
    """How many tokens of prompts a step may have so that it takes a tenth of a second."""

    def __init__(self, batch):
        self.n, self.batch = min(batch, 64), batch

    def prompt_tokens(self, n_decode, hurry):
        room = self.batch - n_decode
        return min(max(self.n - n_decode, LEAST), room) if hurry else room

    def took(self, n, seconds):
        fit = n * STEP / max(seconds, 1e-9)
        if 2 * n >= self.n or fit > self.n:
            self.n = min(max(int(fit), 1), 2 * max(self.n, n), self.batch)


class Worker:
    def __init__(self, clock, step_time, options, chance):
        self.clock, self.time, self.options, self.chance = clock, step_time, options, chance
        self.pages = Pages(options.pages)
        self.sequences = [Sequence() for _ in range(options.sequences)]
        self.pace = Pace(options.batch)
        self.running, self.put_off, self.line = [], [], []
        self.numbers, self.now, self.busy = itertools.count(), 0, False
        # Steps under way, when they began, how long each takes, and how many they are.
        self.batch, self.began, self.each, self.steps = [], 0.0, 0.0, 0
        self.evaluated = self.found = self.busy_time = 0

    # What the router sees.

    def cached(self, prompt):
        """Tokens of whole pages of `prompt` that are in the cache."""
        alike = (seq for seq in self.sequences if seq.n and seq.segments[0][0] == prompt[0][0])
        held = (n_common(prompt, seq.segments, seq.n) for seq in alike)
        return max(held, default=0) // PAGE * PAGE

    def submit(self, request):
        if len(self.line) >= self.options.queue:
            request.refused = True
            return self.clock.after(0, lambda: request.on_end(request))
        self.line.append(request)
        if not self.busy:
            self.busy = True
            self.clock.after(0, self.step)
        elif self.steps > 1:
            # It is looked at when the step ends that is under way now.
            self.steps = min(self.steps, max(1, math.ceil((self.clock.now - self.began) / self.each)))
            self.clock.at(self.began + self.steps * self.each, self.finisher())

    # Sequences.

    def keep(self, seq):
        self.now += 1
        seq.state, seq.used = ("idle" if seq.n else "empty"), self.now

    def rewind(self, seq, n):
        while len(seq.pages) > pages_of(n):
            self.pages.give_back(seq.pages.pop())
        seq.n = n

    def evict(self, seq):
        self.rewind(seq, 0)
        seq.state = "empty"

    def oldest_idle(self, but=None):
        idle = [seq for seq in self.sequences if seq.state == "idle" and seq is not but]
        return min(idle, key=lambda seq: seq.used, default=None)

    def empty(self):
        return next((seq for seq in self.sequences if seq.state == "empty"), None)

    def grow(self, seq, n):
        while len(seq.pages) < pages_of(n):
            if not self.pages.free:
                return False
            seq.pages.append(self.pages.new())
        return True

    # Admission.

    def make_room(self, n, but=None):
        soon = lambda text: min(text.total + PAGE, self.options.context)
        while True:
            missing = sum(max(0, pages_of(soon(text)) - pages_of(text.seq.n)) for text in self.running)
            if self.pages.free >= missing + pages_of(n):
                return True
            seq = self.oldest_idle(but)
            if seq is None:
                return not self.running
            self.evict(seq)

    def place(self, segments, total):
        """A sequence for a text, "later" or "full"."""
        last = total - 1
        prefix, cached = None, 0
        # Of equals it is the last: those that run in the order of their places, then those that are kept.
        for seq in [text.seq for text in self.running] + [seq for seq in self.sequences if seq.state == "idle"]:
            if seq.n and seq.segments[0][0] == segments[0][0]:
                n = min(n_common(segments, seq.segments, seq.n), last)
                if n and n >= cached:
                    prefix, cached = seq, n
        for text in self.running:
            if text.waiting == 1 or text.segments[0][0] != segments[0][0]:
                continue
            n = min(n_common(segments, text.segments), last)
            if n > text.seq.n and n >= cached + WORTH_WAITING:
                return "later"
        room = last + 2
        if prefix and prefix.state == "idle" and prefix.n == cached:
            if self.make_room(max(0, room - cached), prefix):
                return prefix
        elif prefix:
            seq = self.empty() or self.oldest_idle(prefix)
            if seq:
                self.evict(seq)
                if self.make_room(room - cached // PAGE * PAGE, prefix):
                    self.now += 1
                    prefix.used = self.now
                    seq.pages = [self.pages.share(page) for page in prefix.pages[: cached // PAGE]]
                    self.grow(seq, cached)
                    seq.n = cached
                    return seq
        if prefix and prefix.state == "idle":
            self.rewind(prefix, cached)
            self.keep(prefix)
            if self.make_room(max(0, room - cached), prefix):
                return prefix
        seq = self.empty() or self.oldest_idle()
        if seq:
            self.evict(seq)
            if self.make_room(room):
                return seq
        return "full"

    def admit(self):
        while len(self.running) < self.options.parallel:
            waiting = self.put_off + self.line[:LOOK_AHEAD]
            for candidate in waiting:
                again = isinstance(candidate, Text)
                segments = candidate.segments if again else candidate.prompt
                total = candidate.total if again else candidate.n_prompt
                seq = self.place(segments, total)
                if seq == "later":
                    continue
                if seq == "full":
                    return
                if again:
                    self.put_off.remove(candidate)
                    text = candidate
                else:
                    self.line.remove(candidate)
                    text = Text(candidate, next(self.numbers), list(segments), total)
                    candidate.cached = seq.n
                    self.found += seq.n
                seq.state, seq.segments, text.seq = "busy", text.segments, seq
                self.running.append(text)
                break
            else:
                return

    # Steps.

    def step(self):
        self.admit()
        while True:
            batch = self.compose()
            if not batch:
                self.busy = False
                return
            if all([self.grow(text.seq, text.seq.n + n) for text, n in batch]):
                break
            self.give_pages_up()
        self.batch, self.began = batch, self.clock.now
        step = Step()
        for text, n in batch:
            positions = n * (text.seq.n + n / 2)
            if n == 1 and text.waiting == 1 and text.generated:
                step.n_decode, step.positions = step.n_decode + 1, step.positions + positions
            else:
                step.n_prompt, step.prompt_positions = step.n_prompt + n, step.prompt_positions + positions
            step.n_begin += not text.begun
            text.begun = True
        self.each, self.steps = self.time.of(step, self.chance), 1
        if not step.n_prompt and not self.line and not self.put_off and step.n_decode == len(self.running):
            self.stretch()
        self.clock.at(self.began + self.steps * self.each, self.finisher())

    def stretch(self):
        """Nothing but texts that go on: their steps are alike until the first one ends or another one comes."""
        left = lambda text: min(text.request.answer[1] - text.generated, self.options.context - text.total)
        steps = min(left(text) for text, _ in self.batch)
        new = sum(pages_of(text.seq.n + steps) - len(text.seq.pages) for text, _ in self.batch)
        if steps > 1 and new <= self.pages.free:
            positions = sum(text.seq.n + steps / 2 for text, _ in self.batch)
            self.each, self.steps = self.time.usual(Step(n_decode=len(self.batch), positions=positions)), steps

    def finisher(self):
        """The end of the steps under way, unless another end is set meanwhile."""
        self.ending = ending = object()
        return lambda: self.finish() if self.ending is ending else None

    def compose(self):
        following = [text for text in self.running if text.waiting == 1]
        prompts = [text for text in self.running if text.waiting > 1]
        room = self.pace.prompt_tokens(len(following), len(self.running) > 1)
        batch = [(text, 1) for text in following]
        for text in prompts:
            n = min(room, text.waiting)
            room -= n
            if n:
                batch.append((text, n))
        return batch

    def give_pages_up(self):
        idle = self.oldest_idle()
        if idle:
            return self.evict(idle)
        text = max(self.running, key=lambda text: text.number)
        self.running.remove(text)
        if self.running:
            self.put_off.append(text)
            self.put_off.sort(key=lambda text: text.number)
            self.evict(text.seq)
        else:
            self.end(text)

    def finish(self):
        steps, self.steps = self.steps, 0
        self.busy_time += steps * self.each
        self.pace.took(sum(n for _, n in self.batch), self.each)
        ended = []
        for text, n in self.batch:
            if steps > 1:
                n = steps
                self.grow(text.seq, text.seq.n + steps)
            decoded = text.generated > 0 and text.waiting == 1
            text.seq.n += n
            self.evaluated += 0 if decoded else n
            if not decoded and text.seq.n < text.total:
                continue
            new = n if decoded else 1
            text.generated += new
            text.total += new
            if text.generated > 1:
                text.segments[-1] = (text.request.answer[0], text.generated)
            else:
                text.segments.append((text.request.answer[0], 1))
                text.request.first = self.clock.now
                if text.request.on_first:
                    text.request.on_first(text.request)
            if text.generated >= text.request.answer[1] or text.total >= self.options.context:
                ended.append(text)
        # From the last on.
        for text in sorted(ended, key=self.running.index, reverse=True):
            self.running.remove(text)
            self.end(text)
        self.step()

    def end(self, text):
        self.keep(text.seq)
        text.request.end = self.clock.now
        self.clock.after(0, lambda: text.request.on_end(text.request))


class Clock:
    """What happens when."""

    def __init__(self):
        self.now, self.events, self.numbers = 0.0, [], itertools.count()

    def after(self, seconds, event):
        self.at(self.now + seconds, event)

    def at(self, time, event):
        heapq.heappush(self.events, (time, next(self.numbers), event))

    def run(self, until=float("inf")):
        while self.events and self.events[0][0] <= until:
            self.now, _, event = heapq.heappop(self.events)
            event()


class Router:
    """Chooses a worker for each request by one of the `RULES`.

    - round-robin: one after the other.
    - least-loaded: the one with the fewest requests.
    - kv: the one with the least to do, in blocks of 64 tokens: those of prompts that are not evaluated yet, this one's
      without what is `cached` there, and those that its texts hold. This is the cost function of NVIDIA Dynamo's router.
    """

    RULES = ("round-robin", "least-loaded", "kv")

    def __init__(self, rule, n_workers, cached):
        self.rule, self.cached = rule, cached
        self.turn = itertools.cycle(range(n_workers))
        self.requests = [0] * n_workers
        self.prefill = [0] * n_workers
        self.held = [0] * n_workers
        self.ways = {}

    def choose(self, request):
        workers = range(len(self.requests))
        if self.rule == "round-robin":
            worker, new = next(self.turn), 0
        elif self.rule == "least-loaded":
            worker, new = min(workers, key=lambda w: (self.requests[w], w)), 0
        else:
            new_on = [request.n_prompt - self.cached(w, request.prompt) for w in workers]
            cost = lambda w: (self.prefill[w] + new_on[w]) / PAGE + self.held[w]
            worker = min(workers, key=lambda w: (cost(w), self.requests[w], w))
            new = new_on[worker]
        self.requests[worker] += 1
        self.prefill[worker] += new
        self.held[worker] += pages_of(request.n_prompt)
        self.ways[id(request)] = (worker, new)
        return worker

    def first(self, request):
        worker, new = self.ways[id(request)]
        self.prefill[worker] -= new
        self.ways[id(request)] = (worker, 0)

    def end(self, request):
        worker, new = self.ways.pop(id(request))
        self.prefill[worker] -= new
        self.requests[worker] -= 1
        self.held[worker] -= pages_of(request.n_prompt)


class Sent:
    """What a router without news from its workers knows: what it sent to each."""

    def __init__(self, n_workers):
        self.texts = [{} for _ in range(n_workers)]

    def cached(self, worker, prompt):
        known, n = self.texts[worker], 0
        for i, (_, size) in enumerate(prompt):
            if tuple(key for key, _ in prompt[: i + 1]) not in known:
                break
            n += size
        return n // PAGE * PAGE

    def note(self, worker, request):
        keys = [key for key, _ in request.prompt] + [request.answer[0]]
        for i in range(len(keys)):
            self.texts[worker][tuple(keys[: i + 1])] = True


@dataclass
class Chats:
    """What users do: a chat begins with one of several system prompts, and has turns of a user's tokens, an answer, and time
    to read and think. Lengths are spread around their means as an exponential distribution is, within bounds."""

    systems: int = 8
    system_tokens: int = 400
    turns: float = 4
    user_tokens: float = 60
    answer_tokens: float = 200
    think: float = 20
    context: int = 4096

    def chat(self, chance, name):
        """The turns of a chat: prompt, answer and seconds to think after it."""
        spread = lambda mean: max(1, min(int(chance.expovariate(1 / mean)) + 1, int(4 * mean)))
        system = chance.randrange(self.systems)
        segments = [(("system", system), self.system_tokens)]
        turns = []
        for turn in range(spread(self.turns)):
            segments.append(((name, turn, "user"), spread(self.user_tokens)))
            answer = ((name, turn, "answer"), spread(self.answer_tokens))
            if n_tokens(segments) + answer[1] + PAGE > self.context:
                break
            turns.append((list(segments), answer, chance.expovariate(1 / self.think)))
            segments.append(answer)
        return turns


class Cluster:
    """Workers, a router and users."""

    def __init__(self, n_workers, step_time, options, rule, seed=0, by_record=False):
        self.clock = Clock()
        self.workers = [Worker(self.clock, step_time, options, random.Random(repr((seed, i)))) for i in range(n_workers)]
        self.sent = Sent(n_workers) if by_record else None
        cached = self.sent.cached if by_record else lambda w, prompt: self.workers[w].cached(prompt)
        self.router = Router(rule, n_workers, cached)
        self.chance = random.Random(seed)
        self.done, self.refused = [], 0

    def send(self, request):
        request.sent = self.clock.now
        worker = self.router.choose(request)
        if self.sent:
            self.sent.note(worker, request)
        ended = request.on_end

        def on_end(request):
            self.router.end(request)
            if request.refused:
                self.refused += 1
            else:
                self.done.append(request)
            ended(request)

        request.on_first, request.on_end = self.router.first, on_end
        self.workers[worker].submit(request)

    def run_chat(self, turns, after):
        """Sends the turns of a chat one after the other."""
        if not turns:
            return after()
        (prompt, answer, think), *rest = turns
        next_turn = lambda request: self.clock.after(think, lambda: self.run_chat(rest, after))
        self.send(Request(prompt, answer, on_end=next_turn))

    def run_open(self, chats, per_second, seconds):
        """Chats begin at random times, so many a second."""
        names = itertools.count()

        def begin():
            self.run_chat(chats.chat(self.chance, next(names)), lambda: None)
            if self.clock.now < seconds:
                self.clock.after(self.chance.expovariate(per_second), begin)

        self.clock.after(self.chance.expovariate(per_second), begin)
        self.clock.run(seconds)

    def run_trace(self, trace):
        """Requests at their times: when, prompt and answer of each."""
        for at, prompt, answer in trace:
            request = Request(prompt, answer, on_end=lambda request: None)
            self.clock.at(at, lambda request=request: self.send(request))
        self.clock.run()

    def run_users(self, users):
        """Each user has a list of chats, one after the other."""

        def begin(chats):
            if chats:
                self.run_chat(chats[0], lambda: begin(chats[1:]))

        for chats in users:
            begin(chats)
        self.clock.run()


def percentile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * part))] if values else float("nan")


def summary(requests, seconds):
    """Figures of what was done within some time."""
    prompt = sum(request.n_prompt for request in requests)
    firsts = [request.first - request.sent for request in requests]
    between = [(request.end - request.first) / (request.answer[1] - 1) for request in requests if request.answer[1] > 1]
    return {
        "requests": len(requests),
        "tokens_per_second": sum(request.answer[1] for request in requests) / seconds,
        "first_p50": percentile(firsts, 0.5),
        "first_p95": percentile(firsts, 0.95),
        "between_p95": percentile(between, 0.95),
        "hit_rate": sum(request.cached for request in requests) / max(prompt, 1),
    }
