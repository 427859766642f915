"""The cost of a program, counted on its messages, and its rounds in words."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction

from ringcoll.costs.counts import Price
from ringcoll.formats.proof import Proof, SentChunks, in_words

#: With more ranks or more messages, messages are not listed but only counted.
MOST_RANKS, MOST_MESSAGES = 16, 400


def price_of(proof: Proof) -> Price:
    """What the busiest rank of each round pays on a switch, in shards (1/n of the full vector).

    Its additions are those of the busiest rank, or of the longest chain if that is longer. In a
    round, all chunks on one connection are one message. Copies on a rank cost nothing here, as in
    `pricing.price`, and neither does waiting within a rank. A program says nothing about dtypes:
    everything that is sent counts as raw.

    Args:
        proof: the proof of the program.

    >>> paid = formats.price_of(formats.prove(formats.program("psum", "ring", (4,))))
    >>> paid.rounds, paid.messages, paid.sent, paid.additions
    (6, 6, Fraction(6, 1), Fraction(3, 1))
    """
    messages, link, sent = 0, 0, 0
    for one in by_round(proof):
        starts = Counter(sender for sender, *_ in {(m.sender, m.receiver, m.channel) for m in one})
        out, into = Counter[int](), Counter[int]()
        for message in one:
            out[message.sender] += len(message.values)
            into[message.receiver] += len(message.values)
        messages += max(starts.values())
        sent += max(out.values())
        link += max(*out.values(), *into.values())
    shards = Fraction(proof.program.size, proof.program.chunks)
    return Price(
        rounds=proof.rounds,
        messages=messages,
        startups=messages,
        sent=sent * shards,
        raw=sent * shards,
        link=link * shards,
        additions=proof.added * shards,
    )


def by_round(proof: Proof) -> list[list[SentChunks]]:
    """The messages of each round."""
    rounds: list[list[SentChunks]] = [[] for _ in range(proof.rounds)]
    for message in proof.messages:
        rounds[message.round - 1].append(message)
    return rounds


def in_rounds(proof: Proof) -> Iterator[str]:
    """The messages of every rank, round by round, in lines; if they are many, their number."""
    for number, one in enumerate(by_round(proof), 1):
        yield f"round {number} of {proof.rounds}: {len(one)} message" + "s" * (len(one) > 1)
        if proof.program.size > MOST_RANKS or len(proof.messages) > MOST_MESSAGES:
            continue
        sent = defaultdict[tuple[int, int], list[str]](list)
        for message in sorted(one, key=lambda m: (m.sender, m.receiver)):
            sent[message.sender, message.receiver] += map(in_words, message.values)
        for (sender, receiver), values in sent.items():
            yield f"  rank {sender} to {receiver}: {'; '.join(values)}"
