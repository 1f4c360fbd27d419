"""A discrete-event simulation of a cluster of workers behind a router.

A worker simulates the scheduler of crates/metal-attention/src/scheduler: admission and KV pages, the tokens of a batch, the prefix
cache, preemption. Behind a router all requests come from one address, so that fairness among clients plays no role. The duration of a
batch is an input (`StepTime`), measured elsewhere.

The tokens of a sequence are a list of segments, each a key and a number of tokens. Two sequences have a common prefix as far as their
first segments are equal.
"""

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field

PAGE = 64
# The minimum of prefill tokens in a batch, and the target duration of a batch in seconds (`batch_sizer.rs`).
MIN_PREFILL, TARGET_SECONDS = 16, 0.1
# A request waits for a common prefix that another one is evaluating if it is at least this many tokens longer than the cached one, and
# the number of waiting requests that are examined for admission (`admission.rs`).
WORTH_WAITING = 16
LOOK_AHEAD = 32


def pages_of(n_tokens):
    return -(-n_tokens // PAGE)


def n_tokens(segments):
    return sum(n for _, n in segments)


def n_common(a, b, limit_b=None):
    """The length of the common prefix of two lists of segments, in tokens; `limit_b`: only that many tokens of `b` count."""
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
    """The duration of a batch in seconds, as a sum of costs."""

    # Of each batch.
    fixed: float
    # Of each prefill token.
    prompt: float
    # Of each sequence in decode.
    decode: float
    # Of a thousand positions to which sequences in decode attend.
    context: float = 0.0
    # Of a thousand positions to which prefill tokens attend.
    prompt_context: float = 0.0
    # Of each request that begins: work of the CPU, which may also run the model.
    request: float = 0.0
    # Batches with prefill take longer or shorter by a random one of these factors.
    spread: tuple = (1.0,)

    def of(self, step, chance):
        return self.usual(step) * (chance.choice(self.spread) if step.n_prompt else 1.0)

    def usual(self, step):
        model = self.fixed + self.prompt * step.n_prompt + self.decode * step.n_decode
        attention = self.context * step.positions + self.prompt_context * step.prompt_positions
        return model + attention / 1000 + self.request * step.n_begin


@dataclass
class BatchContent:
    """The content of a batch: prefill tokens, sequences in decode, positions to which decode and prefill attend, and requests that
    begin."""

    n_prompt: int = 0
    n_decode: int = 0
    positions: float = 0.0
    prompt_positions: float = 0.0
    n_begin: int = 0


@dataclass
class Options:
    """Options of `serve`: slots, context of each in tokens, tokens of a batch, waiting requests; and the number of finished sequences
    that stay in the prefix cache while there are free pages."""

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
    """A prompt, and the key and number of tokens of its answer. `on_first` and `on_end` are called with the first token and the end."""

    prompt: list
    answer: tuple
    on_first: object = None
    on_end: object = None
    sent: float = 0.0
    first: float = None
    end: float = None
    cached: int = 0
    rejected: bool = False

    @property
    def n_prompt(self):
        return n_tokens(self.prompt)


class Pages:
    """The KV pages, which sequences share; `uses` counts the users of each page."""

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

    def release(self, page):
        self.uses[page] -= 1
        if not self.uses[page]:
            del self.uses[page]
            self.free += 1


@dataclass(eq=False)
class CacheSequence:
    """A sequence of the KV cache, running or kept for its prefix: the first `n` tokens of `segments`."""

    segments: list = field(default_factory=list)
    n: int = 0
    pages: list = field(default_factory=list)
    state: str = "empty"
    used: int = 0


@dataclass(eq=False)
class Sequence:
    """A running or preempted sequence. `total`: its tokens so far, of which `seq` has evaluated `seq.n`."""

    request: Request
    number: int
    segments: list
    total: int
    seq: CacheSequence = None
    generated: int = 0
    begun: bool = False

    @property
    def waiting(self):
        return self.total - self.seq.n


class PrefillBudget:
    """The number of prefill tokens with which a batch takes about `TARGET_SECONDS`, adapted to measured durations."""

    def __init__(self, batch):
        self.n, self.batch = min(batch, 64), batch

    def prompt_tokens(self, n_decode, hurry):
        room = self.batch - n_decode
        return min(max(self.n - n_decode, MIN_PREFILL), room) if hurry else room

    def took(self, n, seconds):
        fit = n * TARGET_SECONDS / max(seconds, 1e-9)
        if 2 * n >= self.n or fit > self.n:
            self.n = min(max(int(fit), 1), 2 * max(self.n, n), self.batch)


class Worker:
    """A server with one engine: queue, running sequences, KV pages and batches."""

    def __init__(self, clock, step_time, options, chance):
        self.clock, self.time, self.options, self.chance = clock, step_time, options, chance
        self.pages = Pages(options.pages)
        self.sequences = [CacheSequence() for _ in range(options.sequences)]
        self.budget = PrefillBudget(options.batch)
        self.running, self.preempted, self.queue = [], [], []
        self.numbers, self.now, self.busy = itertools.count(), 0, False
        # The running batches: their sequences, start time, duration of each, and number.
        self.batch, self.began, self.each, self.steps = [], 0.0, 0.0, 0
        self.evaluated = self.found = self.busy_time = 0

    # The router's view.

    def cached(self, prompt):
        """The cached prefix of `prompt` in tokens of whole pages."""
        alike = (seq for seq in self.sequences if seq.n and seq.segments[0][0] == prompt[0][0])
        held = (n_common(prompt, seq.segments, seq.n) for seq in alike)
        return max(held, default=0) // PAGE * PAGE

    def submit(self, request):
        if len(self.queue) >= self.options.queue:
            request.rejected = True
            return self.clock.after(0, lambda: request.on_end(request))
        self.queue.append(request)
        if not self.busy:
            self.busy = True
            self.clock.after(0, self.step)
        elif self.steps > 1:
            # The request is admitted at the end of the batch that runs now.
            self.steps = min(self.steps, max(1, math.ceil((self.clock.now - self.began) / self.each)))
            self.clock.at(self.began + self.steps * self.each, self.finisher())

    # Sequences.

    def keep(self, seq):
        self.now += 1
        seq.state, seq.used = ("idle" if seq.n else "empty"), self.now

    def rewind(self, seq, n):
        while len(seq.pages) > pages_of(n):
            self.pages.release(seq.pages.pop())
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

    def free_memory(self, n, but=None):
        expected_total = lambda sequence: min(sequence.total + PAGE, self.options.context)
        while True:
            missing = sum(max(0, pages_of(expected_total(sequence)) - pages_of(sequence.seq.n)) for sequence in self.running)
            if self.pages.free >= missing + pages_of(n):
                return True
            seq = self.oldest_idle(but)
            if seq is None:
                return not self.running
            self.evict(seq)

    def place(self, segments, total):
        """The cache sequence for the tokens of a request, "later" (it waits for a prefix), or "full" (no memory)."""
        last = total - 1
        prefix, cached = None, 0
        # Of equally long prefixes the last is used: running sequences in the order of their slots, then kept ones.
        for seq in [sequence.seq for sequence in self.running] + [seq for seq in self.sequences if seq.state == "idle"]:
            if seq.n and seq.segments[0][0] == segments[0][0]:
                n = min(n_common(segments, seq.segments, seq.n), last)
                if n and n >= cached:
                    prefix, cached = seq, n
        for sequence in self.running:
            if sequence.waiting == 1 or sequence.segments[0][0] != segments[0][0]:
                continue
            n = min(n_common(segments, sequence.segments), last)
            if n > sequence.seq.n and n >= cached + WORTH_WAITING:
                return "later"
        room = last + 2
        if prefix and prefix.state == "idle" and prefix.n == cached:
            if self.free_memory(max(0, room - cached), prefix):
                return prefix
        elif prefix:
            seq = self.empty() or self.oldest_idle(prefix)
            if seq:
                self.evict(seq)
                if self.free_memory(room - cached // PAGE * PAGE, prefix):
                    self.now += 1
                    prefix.used = self.now
                    seq.pages = [self.pages.share(page) for page in prefix.pages[: cached // PAGE]]
                    self.grow(seq, cached)
                    seq.n = cached
                    return seq
        if prefix and prefix.state == "idle":
            self.rewind(prefix, cached)
            self.keep(prefix)
            if self.free_memory(max(0, room - cached), prefix):
                return prefix
        seq = self.empty() or self.oldest_idle()
        if seq:
            self.evict(seq)
            if self.free_memory(room):
                return seq
        return "full"

    def admit(self):
        while len(self.running) < self.options.parallel:
            waiting = self.preempted + self.queue[:LOOK_AHEAD]
            for candidate in waiting:
                again = isinstance(candidate, Sequence)
                segments = candidate.segments if again else candidate.prompt
                total = candidate.total if again else candidate.n_prompt
                seq = self.place(segments, total)
                if seq == "later":
                    continue
                if seq == "full":
                    return
                if again:
                    self.preempted.remove(candidate)
                    sequence = candidate
                else:
                    self.queue.remove(candidate)
                    sequence = Sequence(candidate, next(self.numbers), list(segments), total)
                    candidate.cached = seq.n
                    self.found += seq.n
                seq.state, seq.segments, sequence.seq = "busy", sequence.segments, seq
                self.running.append(sequence)
                break
            else:
                return

    # Batches.

    def step(self):
        self.admit()
        while True:
            batch = self.compose()
            if not batch:
                self.busy = False
                return
            if all([self.grow(sequence.seq, sequence.seq.n + n) for sequence, n in batch]):
                break
            self.free_pages()
        self.batch, self.began = batch, self.clock.now
        step = BatchContent()
        for sequence, n in batch:
            positions = n * (sequence.seq.n + n / 2)
            if n == 1 and sequence.waiting == 1 and sequence.generated:
                step.n_decode, step.positions = step.n_decode + 1, step.positions + positions
            else:
                step.n_prompt, step.prompt_positions = step.n_prompt + n, step.prompt_positions + positions
            step.n_begin += not sequence.begun
            sequence.begun = True
        self.each, self.steps = self.time.of(step, self.chance), 1
        if not step.n_prompt and not self.queue and not self.preempted and step.n_decode == len(self.running):
            self.stretch()
        self.clock.at(self.began + self.steps * self.each, self.finisher())

    def stretch(self):
        """If all sequences are in decode, simulates equal batches at once until the first sequence ends or a request arrives."""
        left = lambda sequence: min(sequence.request.answer[1] - sequence.generated, self.options.context - sequence.total)
        steps = min(left(sequence) for sequence, _ in self.batch)
        new = sum(pages_of(sequence.seq.n + steps) - len(sequence.seq.pages) for sequence, _ in self.batch)
        if steps > 1 and new <= self.pages.free:
            positions = sum(sequence.seq.n + steps / 2 for sequence, _ in self.batch)
            self.each, self.steps = self.time.usual(BatchContent(n_decode=len(self.batch), positions=positions)), steps

    def finisher(self):
        """The event that ends the running batches, unless another end is scheduled before."""
        self.ending = ending = object()
        return lambda: self.finish() if self.ending is ending else None

    def compose(self):
        following = [sequence for sequence in self.running if sequence.waiting == 1]
        prompts = [sequence for sequence in self.running if sequence.waiting > 1]
        room = self.budget.prompt_tokens(len(following), len(self.running) > 1)
        batch = [(sequence, 1) for sequence in following]
        for sequence in prompts:
            n = min(room, sequence.waiting)
            room -= n
            if n:
                batch.append((sequence, n))
        return batch

    def free_pages(self):
        idle = self.oldest_idle()
        if idle:
            return self.evict(idle)
        sequence = max(self.running, key=lambda sequence: sequence.number)
        self.running.remove(sequence)
        if self.running:
            self.preempted.append(sequence)
            self.preempted.sort(key=lambda sequence: sequence.number)
            self.evict(sequence.seq)
        else:
            self.end(sequence)

    def finish(self):
        steps, self.steps = self.steps, 0
        self.busy_time += steps * self.each
        self.budget.took(sum(n for _, n in self.batch), self.each)
        ended = []
        for sequence, n in self.batch:
            if steps > 1:
                n = steps
                self.grow(sequence.seq, sequence.seq.n + steps)
            decoded = sequence.generated > 0 and sequence.waiting == 1
            sequence.seq.n += n
            self.evaluated += 0 if decoded else n
            if not decoded and sequence.seq.n < sequence.total:
                continue
            new = n if decoded else 1
            sequence.generated += new
            sequence.total += new
            if sequence.generated > 1:
                sequence.segments[-1] = (sequence.request.answer[0], sequence.generated)
            else:
                sequence.segments.append((sequence.request.answer[0], 1))
                sequence.request.first = self.clock.now
                if sequence.request.on_first:
                    sequence.request.on_first(sequence.request)
            if sequence.generated >= sequence.request.answer[1] or sequence.total >= self.options.context:
                ended.append(sequence)
        # In reverse order, as in the scheduler.
        for sequence in sorted(ended, key=self.running.index, reverse=True):
            self.running.remove(sequence)
            self.end(sequence)
        self.step()

    def end(self, sequence):
        self.keep(sequence.seq)
        sequence.request.end = self.clock.now
        self.clock.after(0, lambda: sequence.request.on_end(sequence.request))


class Clock:
    """The simulated time and the queue of events."""

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
    - kv: the one with the lowest cost in blocks of 64 tokens: the prompt tokens that it has not evaluated yet, including this
      prompt's tokens that are not `cached` there, plus the blocks of its running sequences. This is the cost function of NVIDIA
      Dynamo's router.
    """

    RULES = ("round-robin", "least-loaded", "kv")

    def __init__(self, rule, n_workers, cached):
        self.rule, self.cached = rule, cached
        self.turn = itertools.cycle(range(n_workers))
        self.requests = [0] * n_workers
        self.prefill = [0] * n_workers
        self.held = [0] * n_workers
        self.assigned = {}

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
        self.assigned[id(request)] = (worker, new)
        return worker

    def first(self, request):
        worker, new = self.assigned[id(request)]
        self.prefill[worker] -= new
        self.assigned[id(request)] = (worker, 0)

    def end(self, request):
        worker, new = self.assigned.pop(id(request))
        self.prefill[worker] -= new
        self.requests[worker] -= 1
        self.held[worker] -= pages_of(request.n_prompt)


class SentRequests:
    """The prompts that a router sent to each worker, from which it estimates the workers' prefix caches."""

    def __init__(self, n_workers):
        self.sequences = [{} for _ in range(n_workers)]

    def cached(self, worker, prompt):
        known, n = self.sequences[worker], 0
        for i, (_, size) in enumerate(prompt):
            if tuple(key for key, _ in prompt[: i + 1]) not in known:
                break
            n += size
        return n // PAGE * PAGE

    def note(self, worker, request):
        keys = [key for key, _ in request.prompt] + [request.answer[0]]
        for i in range(len(keys)):
            self.sequences[worker][tuple(keys[: i + 1])] = True


@dataclass
class Chats:
    """A model of users: a chat begins with one of several system prompts and has turns of a user's message, an answer, and a pause.
    Lengths are exponentially distributed around their means, within bounds."""

    systems: int = 8
    system_tokens: int = 400
    turns: float = 4
    user_tokens: float = 60
    answer_tokens: float = 200
    think: float = 20
    context: int = 4096

    def chat(self, chance, name):
        """The turns of a chat: prompt, answer, and pause after it in seconds."""
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
        self.sent = SentRequests(n_workers) if by_record else None
        cached = self.sent.cached if by_record else lambda w, prompt: self.workers[w].cached(prompt)
        self.router = Router(rule, n_workers, cached)
        self.chance = random.Random(seed)
        self.done, self.rejected = [], 0

    def send(self, request):
        request.sent = self.clock.now
        worker = self.router.choose(request)
        if self.sent:
            self.sent.note(worker, request)
        ended = request.on_end

        def on_end(request):
            self.router.end(request)
            if request.rejected:
                self.rejected += 1
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
        """Chats begin at random times, on average `per_second`."""
        names = itertools.count()

        def begin():
            self.run_chat(chats.chat(self.chance, next(names)), lambda: None)
            if self.clock.now < seconds:
                self.clock.after(self.chance.expovariate(per_second), begin)

        self.clock.after(self.chance.expovariate(per_second), begin)
        self.clock.run(seconds)

    def run_trace(self, trace):
        """Sends requests at given times. `trace`: time, prompt and answer of each."""
        for at, prompt, answer in trace:
            request = Request(prompt, answer, on_end=lambda request: None)
            self.clock.at(at, lambda request=request: self.send(request))
        self.clock.run()

    def run_users(self, users):
        """Runs users at the same time, each with a list of chats one after the other."""

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
    """Throughput, latencies and cache hit rate of requests that were done in `seconds`."""
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
