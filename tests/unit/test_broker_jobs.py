"""Sandbox jobs: fair, oldest lease first, bounded by free slots, moved when a worker dies, answered once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from temper.broker import events as ev
from temper.broker.jobs import DEATHS_ALLOWED, JobBook
from temper.broker.sessions import SESSIONS_OF_A_PEER
from temper.common.schema import Hello, Job, JobCancel, JobDone

from tests.unit.test_broker_memory import ACTOR, Desk, delivery


def job(name: str, lease: int = 0, domain: str = "code", session: str | None = None) -> Job:
    return Job(name, lease, domain, session)


def started(actions: list[ev.Action]) -> list[tuple[str, str]]:
    return [(a.worker, a.job_id) for a in actions if isinstance(a, ev.AssignJob)]


def test_a_worker_gets_no_more_jobs_than_it_has_slots() -> None:
    book = JobBook()
    book.add_worker("w", 2)
    for name in "abc":
        book.submit("actor", job(name))
    assert started(book.assign()) == [("w", "a"), ("w", "b")]
    assert book.waiting == 1
    forwarded = book.done("w", JobDone("a", "ok"))
    assert forwarded == [ev.ForwardVerdict("actor", JobDone("a", "ok")), ev.DropJob("a")]
    assert started(book.assign()) == [("w", "c")]


def test_the_oldest_lease_is_graded_first() -> None:
    book = JobBook()
    for lease in (9, 3, 7):
        book.submit("actor", job(f"lease-{lease}", lease))
    book.add_worker("w", 1)
    order = []
    for _ in range(3):
        ((_, name),) = started(book.assign())
        order.append(name)
        book.done("w", JobDone(name, "ok"))
    assert order == ["lease-3", "lease-7", "lease-9"]


def test_a_flood_of_one_domain_or_requester_does_not_starve_another() -> None:
    book = JobBook()
    for i in range(50):
        book.submit("greedy", job(f"g{i}", i, "flood"))
    book.submit("modest", job("m", 1000, "flood"))
    book.submit("greedy", job("other", 2000, "rare"))
    book.add_worker("w", 4)
    assert {name for _, name in started(book.assign())} >= {"m", "other"}


def test_the_death_of_a_worker_moves_its_jobs_and_a_late_verdict_counts_once() -> None:
    book = JobBook()
    book.add_worker("w1", 1)
    book.submit("actor", job("a"))
    book.assign()
    book.add_worker("w2", 1)
    book.worker_left("w1", "kill -9")
    assert started(book.assign()) == [("w2", "a")]
    assert book.done("w1", JobDone("a", "ok")) == []
    assert ev.ForwardVerdict("actor", JobDone("a", "ok")) in book.done("w2", JobDone("a", "ok"))
    assert book.done("w2", JobDone("a", "ok")) == []
    assert book.submit("actor", job("b")) == []


def test_a_job_that_kills_its_workers_is_answered_with_infra() -> None:
    book = JobBook()
    book.submit("actor", job("poison"))
    for n in range(DEATHS_ALLOWED):
        book.add_worker(f"w{n}", 1)
        assert started(book.assign()) == [(f"w{n}", "poison")]
        actions = book.worker_left(f"w{n}", "gone")
    (failure,) = [a for a in actions if isinstance(a, ev.FailJob)]
    assert (failure.requester, failure.job_id) == ("actor", "poison")
    assert book.jobs == {}


def test_a_session_stays_on_its_worker_and_ends_with_it() -> None:
    book = JobBook()
    book.add_worker("w1", 1)
    book.submit("actor", job("s1", session="s"))
    assert started(book.assign()) == [("w1", "s1")]
    book.add_worker("w2", 5)
    book.submit("actor", job("s2", session="s"))
    assert started(book.assign()) == []  # w2 is free, but the session lives on w1
    book.done("w1", JobDone("s1", "ok"))
    assert started(book.assign()) == [("w1", "s2")]
    book.submit("actor", job("s3", session="s"))
    book.assign()
    failed = [a.job_id for a in book.worker_left("w1", "gone") if isinstance(a, ev.FailJob)]
    assert failed == ["s2", "s3"]


def test_a_closed_session_is_forgotten() -> None:
    book = JobBook()
    book.add_worker("w1", 1)
    for n in range(1000):
        book.submit("actor", job(f"open{n}", session=f"s{n}"))
        book.assign()
        book.done("w1", JobDone(f"open{n}", "ok"))
        assert len(book.sessions) == 1
        book.submit("actor", Job(f"close{n}", 0, "code", f"s{n}", close_session=True))
        assert started(book.assign()) == [("w1", f"close{n}")]
        book.done("w1", JobDone(f"close{n}", "ok"))
        assert len(book.sessions) == 0
    book.add_worker("w2", 5)
    book.submit("actor", job("again", session="s1"))
    assert started(book.assign()) == [("w2", "again")]  # nothing ties it to w1 any more


def test_a_session_belongs_to_who_named_it_first() -> None:
    book = JobBook()
    book.add_worker("w", 4)
    book.submit("one", job("a", session="s"))
    (refusal,) = book.submit("two", job("b", session="s"))
    assert isinstance(refusal, ev.RefusePeer) and refusal.peer == "two" and "b" not in book.jobs
    book.assign()
    assert book.end_session("two", "s") == []
    assert book.end_session("one", "s") == [ev.CancelJob("w", "a"), ev.DropJob("a"), ev.EndSession("w", "s")]
    assert book.jobs == {} and len(book.sessions) == 0
    assert book.end_session("one", "s") == []


def test_a_cancelled_step_takes_its_session_along_and_a_waiting_one_does_not() -> None:
    book = JobBook()
    book.add_worker("w1", 1)
    book.submit("actor", job("a", session="s"))
    book.assign()
    book.submit("actor", job("b", session="s"))
    book.cancel("actor", "b")
    assert book.sessions.worker("s") == "w1"
    book.cancel("actor", "a")
    assert len(book.sessions) == 0


def test_a_requester_that_leaves_ends_its_sessions_and_only_those() -> None:
    book = JobBook()
    book.add_worker("w", 4)
    for who in ("one", "two"):
        book.submit(who, job(f"j-{who}", session=f"s-{who}"))
        book.assign()
        book.done("w", JobDone(f"j-{who}", "ok"))
    assert book.requester_left("one") == [ev.EndSession("w", "s-one")]
    assert book.sessions.worker("s-two") == "w"


def test_a_worker_brings_its_sessions_over_a_restart_of_the_broker() -> None:
    book = JobBook()
    book.add_worker("w1", 0)
    book.add_worker("w2", 8)
    book.adopt("w1", 2, ["a"], ["s", "t"])
    book.submit("actor", job("a", session="s"))
    book.submit("actor", job("b", session="t"))
    assert started(book.assign()) == [("w1", "b")]
    assert book.submit("thief", job("c", session="t"))[0] == ev.RefusePeer(
        "thief", "malformed", "session 't' belongs to another peer"
    )
    for name in "ab":
        book.done("w1", JobDone(name, "ok"))
    assert book.requester_left("actor") == [ev.EndSession("w1", "s"), ev.EndSession("w1", "t")]


def test_sessions_that_nobody_closes_are_bounded() -> None:
    book = JobBook()
    book.add_worker("w", 1)
    ended = []
    for n in range(SESSIONS_OF_A_PEER + 10):
        actions = book.submit("actor", job(f"j{n}", session=f"s{n}"))
        ended += [action.name for action in actions if isinstance(action, ev.EndSession)]
        book.assign()
        book.done("w", JobDone(f"j{n}", "ok"))
    assert ended == [f"s{n}" for n in range(10)] and len(book.sessions) == SESSIONS_OF_A_PEER


def test_waiting_steps_of_a_dead_workers_session_are_not_run_elsewhere() -> None:
    book = JobBook()
    book.add_worker("w1", 1)
    book.submit("actor", job("a", session="s"))
    book.assign()
    book.submit("actor", job("b", session="s"))  # waits, not even looked at yet
    book.add_worker("w2", 4)
    failed = [a.job_id for a in book.worker_left("w1", "gone") if isinstance(a, ev.FailJob)]
    assert failed == ["a", "b"] and started(book.assign()) == [] and len(book.sessions) == 0


def test_cancelling_reaches_the_worker_and_frees_its_slot() -> None:
    book = JobBook()
    book.add_worker("w", 1)
    book.submit("actor", job("a"))
    book.submit("actor", job("b"))
    book.assign()
    assert book.cancel("stranger", "a") == []
    assert book.cancel("actor", "a") == [ev.CancelJob("w", "a"), ev.DropJob("a")]
    assert started(book.assign()) == [("w", "b")]
    assert ev.CancelJob("w", "b") in book.requester_left("actor")
    assert book.jobs == {}


def test_the_job_id_of_another_peer_is_an_offence() -> None:
    book = JobBook()
    book.submit("one", job("a"))
    (refusal,) = book.submit("two", job("a"))
    assert isinstance(refusal, ev.RefusePeer)
    assert refusal.peer == "two"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["submit", "done", "left", "join", "cancel"]), st.integers(0, 30))))
def test_every_job_is_answered_or_cancelled_exactly_once(steps: list[tuple[str, int]]) -> None:
    book, workers, answers, submitted = JobBook(), 0, Counter[str](), 0

    def note(actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.ForwardVerdict):
                answers[action.done.job_id] += 1
            elif isinstance(action, ev.FailJob):
                answers[action.job_id] += 1

    for what, n in steps:
        running = sorted(name for jobs in book.running.values() for name in jobs)
        if what == "submit":
            note(book.submit(f"actor-{n % 3}", job(f"j{submitted}", n, f"d{n % 2}", f"s{n}" if n > 20 else None)))
            submitted += 1
        elif what == "join":
            workers += 1
            book.add_worker(f"w{workers}", 1 + n % 3)
        elif what == "left" and book.slots:
            note(book.worker_left(sorted(book.slots)[n % len(book.slots)], "gone"))
        elif what == "done" and running:
            name = running[n % len(running)]
            note(book.done(book.jobs[name].worker, JobDone(name, "ok")))
        elif what == "cancel" and running:
            name = running[n % len(running)]
            note(book.cancel(book.jobs[name].requester, name))
            answers[name] += 1
        note(book.assign())
        for worker, jobs in book.running.items():
            assert len(jobs) <= book.slots[worker]
            assert all(book.jobs[name].worker == worker for name in jobs)
        assert submitted == book.finished + len(book.jobs)
    book.add_worker("last", 1000)
    for _ in range(3):
        note(book.assign())
        for name in [name for jobs in book.running.values() for name in jobs]:
            note(book.done(book.jobs[name].worker, JobDone(name, "ok")))
    assert set(answers) == {f"j{i}" for i in range(submitted)}
    assert set(answers.values()) <= {1}


def test_a_job_that_comes_again_with_its_verdict_is_a_job(tmp_path: Path) -> None:
    """After a resync a requester sends what it may have sent before; the verdict may come in the same turn."""
    desk, worker = Desk(tmp_path, 1 << 20), b"worker"
    key = desk.desk.guests.add(worker, Hello("sandbox", "worker", "session"))
    desk.desk.take(ev.Joined(key, "sandbox", "worker", 1))
    for number in range(2):
        desk.desk.on_batch([delivery(ACTOR, job("a"), [b"program %d" % number])])
        assert desk.wire.take() == [(worker, job("a"), [b"program %d" % number])]
        done = delivery(worker, JobDone("a", "ok"), [b"verdict"])
        desk.desk.on_batch([done, delivery(ACTOR, job("a"), [b"another"])])
        verdict, again = desk.wire.take()
        assert verdict == (ACTOR, JobDone("a", "ok"), [b"verdict"]) and again == (worker, job("a"), [b"another"])
        desk.desk.on_batch([delivery(ACTOR, JobCancel("a")), delivery(worker, JobDone("a", "ok"))])
        assert [body for _, body, _ in desk.wire.take()] == [JobCancel("a")]
        assert desk.desk._jobs == {}
