"""The nodes behind a grid: which client each of them is, and sending them messages."""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from logging import INFO, WARNING, getLogger

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from fedala.errors import UserError
from fedala.flower.messages import PARTS, Introduction, clean_text

log = getLogger("flwr")

#: The most seconds between two looks at the nodes, and at their answers.
PAUSE = 1.0
#: The seconds after the first look, and after an answer: others may be about to come.
FIRST_PAUSE = 0.02
#: Seconds between two lines of the log that say what a run waits for.
REPORT_PAUSE = 30.0
#: The most reasons for missing updates that are remembered.
MAX_PROBLEMS = 1000

REMEDY = "if this change is intended, start the run once with rebind=true"


class Nodes:
    """The clients of a federation behind a grid.

    A client is known by its number. The first node that introduces itself under a number owns it.
    Flower gives a registered key the same node id forever, so another id means another key.
    """

    def __init__(
        self,
        grid: Grid,
        population: int,
        min_clients: int,
        *,
        max_samples: int = 2**53,
        validates: bool = True,
        rebind: bool = False,
        can_connect: bool = True,
        max_clients: int = 0,
    ) -> None:
        """A round begins when `min_clients` of the `population` are online.

        A node that reports more than `max_samples` samples is refused. So is one that reports
        validation samples if the run does not use any (`validates`). With `rebind`, a client that
        is offline may return as another node. If no further node can connect (`can_connect`), the
        wait ends when all of them have answered. With `max_clients` above the population, clients
        with further numbers may join.
        """
        self.grid, self.population, self.min_clients = grid, population, min_clients
        #: Every client's number is below this.
        self.seats = max(population, max_clients)
        self.max_sizes = dict.fromkeys(PARTS, max_samples)
        if not validates:
            self.max_sizes["validation"] = 0
        self.rebind, self.can_connect = rebind, can_connect
        #: The node id of each client that has introduced itself, and its number of samples.
        self.node_ids: dict[int, int] = {}
        self.sizes: dict[int, Mapping[str, int]] = {}
        #: The node id that owns each client's number, online or not.
        self.owners: dict[int, int] = {}
        #: Why nodes that are online are not clients.
        self._refused: dict[int, str] = {}
        #: Why updates did not count, and how often.
        self.problems: Counter[str] = Counter()

    def find_online_clients(self) -> dict[int, int]:
        """Return the node ids of the clients that are online now."""
        online = set(self.grid.get_node_ids())
        return {client: node for client, node in self.node_ids.items() if node in online}

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until enough clients are online."""
        end = time.monotonic() + seconds
        last_count, next_report = -1, 0.0
        while True:
            self._query_new_nodes(max(1.0, end - time.monotonic()))
            count = len(self.find_online_clients())
            if count >= self.min_clients:
                return
            now = time.monotonic()
            if now >= end:
                raise UserError(
                    f"After {seconds:g} s, {count} clients are online, but {self.min_clients} are "
                    f"required. Start more nodes, or lower min_nodes.{self._explain_refusals()}"
                )
            if self._is_complete():
                raise UserError(
                    f"{count} clients are online, but {self.min_clients} are required, and no "
                    "further nodes can connect in a simulation. Raise num-supernodes, or lower "
                    f"min_nodes.{self._explain_refusals()}"
                )
            if count != last_count or now >= next_report:
                log.log(
                    WARNING if self._refused else INFO,
                    "Waiting for clients: %d online, at least %d required.%s",
                    count, self.min_clients, self._explain_refusals(),
                )  # fmt: skip
                last_count, next_report = count, now + REPORT_PAUSE
            time.sleep(PAUSE)

    def _is_complete(self) -> bool:
        """Tell whether every node that can ever connect has said who it is, or was refused."""
        known = {*self.node_ids.values(), *self._refused}
        # Before the first answer, the simulation engine may still be adding nodes.
        return not self.can_connect and bool(known) and known >= set(self.grid.get_node_ids())

    def _explain_refusals(self) -> str:
        """Return how many of the nodes are refused, and the commonest reason, as sentences."""
        if not self._refused:
            return ""
        [(reason, _)] = Counter(self._refused.values()).most_common(1)
        online = set(self.grid.get_node_ids())
        share = f"{len(self._refused)} of {len(online)} connected nodes"
        who = "every connected node" if online <= self._refused.keys() else share
        return f" Refused: {who}; the commonest reason is: {reason}."

    def keep_seats(self, clients: Collection[int]) -> None:
        """Let these clients, which have joined before, come back if there are fewer seats now."""
        seats = max((self.seats, *(client + 1 for client in clients)))
        if seats > self.seats:
            self.seats = seats
            self._refused.clear()  # one of them may have introduced itself already

    def restore_owners(self, owners: Mapping[int, int]) -> None:
        """Restore the owners of an earlier run of this experiment. Refuse nodes that contradict."""
        if self.rebind:
            return
        self.owners |= owners
        for client, node in list(self.node_ids.items()):
            if node != self.owners[client]:
                self.forget_introduction(client)
                self._refuse(node, _explain_owner(client, self.owners[client]))

    def note_problem(self, reason: str) -> None:
        """Remember why an update does not count."""
        if reason in self.problems or len(self.problems) < MAX_PROBLEMS:
            self.problems[reason] += 1

    def forget_introduction(self, client: int) -> None:
        """Forget a client's introduction, so that it is queried again before the next round."""
        self.node_ids.pop(client, None)
        self.sizes.pop(client, None)

    def exchange(
        self, message_type: str, contents: Mapping[int, RecordDict], round: int, seconds: float
    ) -> dict[int, Message]:
        """Send each client its content; return the answers that arrive in time, by client.

        The log names each client that is offline, fails or does not answer.
        """
        online = self.find_online_clients()
        messages = {}
        for client, content in contents.items():
            if client in online:
                messages[client] = Message(
                    content,
                    dst_node_id=online[client],
                    message_type=message_type,
                    group_id=str(round),
                    ttl=seconds + 60,
                )
        for client in sorted(contents.keys() - online.keys()):
            log.warning("Round %d: client %d is offline.", round, client)
            self.note_problem("it was offline")
        answers = {}
        for client, answer in self._send_and_collect(messages, seconds):
            if isinstance(answer, UserError):
                problem = clean_text(answer)
                self.note_problem(problem)
                log.warning(
                    "Round %d: client %d (node %d) failed: %s.",
                    round, client, online[client], problem,
                )  # fmt: skip
            else:
                answers[client] = answer
        return answers

    def _query_new_nodes(self, seconds: float) -> None:
        """Ask every node that has not introduced itself who it is."""
        online = set(self.grid.get_node_ids())
        for node in self._refused.keys() - online:
            del self._refused[node]  # when it comes back, it may have been repaired
        new_nodes = sorted(online - set(self.node_ids.values()) - self._refused.keys())
        messages = {
            node: Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
            for node in new_nodes
        }
        for node, answer in self._send_and_collect(messages, seconds):
            try:
                if isinstance(answer, UserError):
                    raise answer
                said = Introduction.unpack(answer.content, self.seats, self.max_sizes)
                self._claim_number(said.client, node, online)
            except Exception as error:  # any problem with an answer concerns this node alone
                self._refuse(node, clean_text(error))
                continue
            log.info(
                "Node %d is client %d, with %d training samples.",
                node, said.client, said.sizes["train"],
            )  # fmt: skip
            self.node_ids[said.client], self.sizes[said.client] = node, said.sizes

    def _claim_number(self, client: int, node: int, online: Collection[int]) -> None:
        """Make the node the owner of a number, unless another node owns it or it owns another."""
        owner = self.owners.get(client, node)
        if owner in online and owner != node:
            raise UserError(f"it says that it is client {client}, which is node {owner}")
        others = {c for c, n in self.owners.items() if c != client and n == node}
        if not self.rebind and owner != node:
            raise UserError(_explain_owner(client, owner))
        if not self.rebind and others:
            raise UserError(
                f"it says that it is client {client}, but it is client {min(others)}; {REMEDY}"
            )
        for other in others:
            del self.owners[other]
        self.owners[client] = node

    def _refuse(self, node: int, reason: str) -> None:
        log.warning("Node %d is refused: %s.", node, reason)
        self._refused[node] = reason

    def _send_and_collect(
        self, messages: Mapping[int, Message], seconds: float
    ) -> Iterator[tuple[int, Message | UserError]]:
        """Send messages; yield the key of each with its answer, or the reason why there is none.

        `_pull_answers` fetches them.
        """
        accepted = set(self.grid.push_messages(messages.values())) if messages else set()
        waiting = {message.metadata.message_id: key for key, message in messages.items()}
        for message_id in waiting.keys() - accepted:
            yield waiting.pop(message_id), UserError("the SuperLink did not accept its message")
        end = time.monotonic() + seconds
        pause = FIRST_PAUSE
        while waiting:
            start, before = time.monotonic(), len(waiting)
            sent = {message_id: messages[key] for message_id, key in waiting.items()}
            for message_id, answer in self._pull_answers(sent):
                yield waiting.pop(message_id), answer
            now = time.monotonic()
            if waiting and now >= end:
                break
            if waiting:
                pause = FIRST_PAUSE if len(waiting) < before else min(1.5 * pause, PAUSE)
                # At most half of the time goes into looking.
                time.sleep(min(max(pause, now - start), end - now))
        for key in sorted(waiting.values()):
            yield key, UserError(f"it did not answer within {seconds:g} s")

    def _pull_answers(
        self, sent: Mapping[str, Message]
    ) -> Iterator[tuple[str, Message | UserError]]:
        """Yield the id of each message that has an answer, with it or the reason to refuse it.

        Answers are fetched one at a time. Fetched together, one that Flower cannot decode would
        take the others with it. Also, the SuperLink then tells which message an answer belongs to,
        not the answer itself. In the simulation engine, all nodes are the user's own, and nothing
        is decoded. There, a thousand requests would keep the nodes from working.
        """
        if isinstance(self.grid, InMemoryGrid):
            found: dict[str, list[Message]] = {}
            for answer in self.grid.pull_messages(list(sent)):
                found.setdefault(answer.metadata.reply_to_message_id, []).append(answer)
            for message_id in [one for one in sent if one in found]:
                yield message_id, _check_answers(sent[message_id], found[message_id])
            return
        for message_id, message in sent.items():
            pulled = self._pull_answer(message_id, message)
            if pulled is not None:
                yield message_id, pulled

    def _pull_answer(self, message_id: str, message: Message) -> Message | UserError | None:
        """Fetch the answer to one message, or the reason to refuse it. None: not there yet."""
        try:
            answers = list(self.grid.pull_messages([message_id]))
            return _check_answers(message, answers) if answers else None
        except Exception as error:  # Flower's decoder may raise anything, for this answer alone
            return UserError(f"its answer cannot be read ({clean_text(error)})")


def _check_answers(message: Message, answers: list[Message]) -> Message | UserError:
    """Return the one answer to a message, or the reason to refuse it."""
    [answer, *others] = answers
    if answer.has_error():
        # For a node that has left, the SuperLink answers.
        reason = clean_text(answer.error.reason or "no reason given")
        return UserError(f"{reason} (code {answer.error.code})")
    request, reply = message.metadata, answer.metadata
    if (reply.reply_to_message_id, reply.src_node_id) != (request.message_id, request.dst_node_id):
        return UserError("its answer belongs to another message")
    if reply.message_type != request.message_type:
        return UserError("its answer has another type than the message")
    if not answer.has_content():
        return UserError("its answer is empty")
    if others:
        return UserError(f"it answered {len(answers)} times")
    return answer


def _explain_owner(client: int, node: int) -> str:
    return f"it says that it is client {client}, a number that belongs to node {node}; {REMEDY}"
