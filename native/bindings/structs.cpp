// The structs that Python passes to the engine and gets from it. Their fields have names on both sides.
#include "convert.hpp"

namespace ringfold {
namespace {

nb::tuple to_tuple(const std::vector<PeerId>& peers) {
  auto out = nb::steal<nb::tuple>(PyTuple_New(static_cast<Py_ssize_t>(peers.size())));
  for (std::size_t i = 0; i < peers.size(); ++i) {
    PyTuple_SetItem(out.ptr(), static_cast<Py_ssize_t>(i), nb::int_(peers[i]).release().ptr());
  }
  return out;
}

using RawPayloads = std::optional<std::vector<std::optional<nb::bytes>>>;

RawPayloads payloads_to_python(const std::optional<Payloads>& payloads) {
  if (!payloads) return std::nullopt;
  std::vector<std::optional<nb::bytes>> out;
  for (const Payload& payload : *payloads) {
    if (payload.is_there()) out.emplace_back(nb::bytes(payload.data(), payload.size()));
    else out.emplace_back();
  }
  return out;
}

std::optional<Payloads> payloads_from_python(const RawPayloads& payloads) {
  if (!payloads) return std::nullopt;
  Payloads out;
  for (const std::optional<nb::bytes>& payload : *payloads) {
    out.push_back(payload ? Payload(from_python(*payload)) : Payload());
  }
  return out;
}

const char* name_of(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::opened:
      return "opened";
    case Event::Kind::accepted:
      return "accepted";
    case Event::Kind::message:
      return "message";
    case Event::Kind::closed:
      return "closed";
    case Event::Kind::link_lost:
      return "link_lost";
    case Event::Kind::mismatch:
      return "mismatch";
    case Event::Kind::op_timeout:
      return "op_timeout";
    case Event::Kind::op_cancelled:
      return "op_cancelled";
    case Event::Kind::silent:
      return "silent";
    case Event::Kind::blocks:
      return "blocks";
    case Event::Kind::sample:
      return "sample";
    case Event::Kind::wake:
      return "wake";
  }
  return "";
}

std::vector<Array> arrays_of(const std::vector<nb::object>& objects) {
  std::vector<Array> out;
  for (const nb::object& object : objects) {
    Array array;
    if (!nb::try_cast(object, array, false)) throw nb::type_error("not a contiguous array in the memory of the CPU");
    out.push_back(std::move(array));
  }
  return out;
}

// Every op returns a result, and Python reads most of its fields: plain getters cost half as much as bound properties.
template <auto field>
PyObject* get(PyObject* self, void*) {
  const OpResult& result = *nb::inst_ptr<OpResult>(self);
  using Field = std::decay_t<decltype(result.*field)>;
  if constexpr (std::is_same_v<Field, OpStatus>) return PyLong_FromLong(static_cast<long>(result.*field));
  else if constexpr (std::is_integral_v<Field>) return PyLong_FromUnsignedLongLong(result.*field);
  else if constexpr (std::is_same_v<Field, Bytes>) return to_python(result.*field).release().ptr();
  else return to_tuple(result.*field).release().ptr();
}

PyGetSetDef op_result_fields[] = {
    {"status", get<&OpResult::status>, nullptr, "An `OpStatus`.", nullptr},
    {"reason", get<&OpResult::reason>, nullptr, "As it was passed in.", nullptr},
    {"epoch", get<&OpResult::epoch>, nullptr, nullptr, nullptr},
    {"contributors", get<&OpResult::contributors>, nullptr, "Peer ids, sorted.", nullptr},
    {"registrations", get<&OpResult::registrations>, nullptr, nullptr, nullptr},
    {"sent_bytes", get<&OpResult::sent_bytes>, nullptr, nullptr, nullptr},
    {"received_bytes", get<&OpResult::received_bytes>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot op_result_slots[] = {{Py_tp_getset, op_result_fields}, {0, nullptr}};

void bind_ops(nb::module_& m) {
  nb::class_<PyBlocks> blocks(m, "Blocks", "How far the copies of an op's memory are, from a device and towards it.");
  blocks.def(
      "__init__",
      [](PyBlocks* self, std::vector<std::size_t> ends) {
        new (self) PyBlocks{std::make_shared<Blocks>(std::move(ends))};
      },
      "ends"_a, "Where each block of the op's bytes ends.");
  blocks.def(
      "fill", [](const PyBlocks& self, std::size_t block) { self.blocks->fill(block); }, "block"_a,
      "The caller's values are there: the op may use them.");
  blocks.def_prop_ro("count", [](const PyBlocks& self) { return self.blocks->count(); });
  blocks.def_prop_ro("filled", [](const PyBlocks& self) { return self.blocks->filled(); }, "How many are filled.");
  blocks.def(
      "take_final",
      [](const PyBlocks& self, double timeout_s) {
        Blocks::Final final;
        {
          nb::gil_scoped_release free;
          final = self.blocks->take_final(static_cast<Ns>(timeout_s * 1e9));
        }
        return std::pair(final.attempt, std::move(final.blocks));
      },
      "timeout_s"_a,
      "Block without the GIL until blocks have their results, or it is closed: the attempt, and those that were not "
      "taken before.");
  blocks.def("close", [](const PyBlocks& self) { self.blocks->close(); }, "Wake the thread in take_final.");

  nb::class_<OpRequest> request(m, "OpRequest", "A collective. Its arrays are read and written until it has ended.");
  request.def(
      "__init__",
      [](OpRequest* self, int kind, int reduce_op, std::uint64_t tag, std::vector<nb::object> source,
         std::vector<int> dtypes, int retry, Ns timeout_ns, std::optional<std::vector<nb::object>> target, int root,
         int quantisation, bool again, bool contribute, std::optional<PyBlocks> blocks) {
        OpRequest made{kind,
                       reduce_op,
                       tag,
                       root,
                       arrays_of(source),
                       {},
                       std::move(dtypes),
                       retry,
                       timeout_ns,
                       quantisation,
                       again,
                       contribute,
                       blocks ? blocks->blocks : nullptr};
        if (target) made.target = arrays_of(*target);
        made.source_objects = std::move(source);
        made.target_objects = std::move(target);
        new (self) OpRequest(std::move(made));
      },
      nb::kw_only(), "kind"_a, "reduce_op"_a, "tag"_a, "source"_a, "dtypes"_a, "retry"_a, "timeout_ns"_a,
      "target"_a.none() = nb::none(), "root"_a = 0, "quantisation"_a = 0, "again"_a = false, "contribute"_a = true,
      "blocks"_a.none() = nb::none(),
      nb::sig(
          "def __init__(self, *, kind: int, reduce_op: int, tag: int, source: Sequence[NDArray], "
          "dtypes: Sequence[int], retry: int, timeout_ns: int, target: Sequence[NDArray] | None = None, root: int = 0, "
          "quantisation: int = 0, again: bool = False, contribute: bool = True, blocks: Blocks | None = None) -> None"),
      "`again`: another attempt of the last call on this tag. Without `contribute` the content of `source` has no part "
      "in a reduction. Without `target` the op is in place. With `blocks` it goes on as they are filled.");
  request.def_ro("kind", &OpRequest::kind);
  request.def_ro("reduce_op", &OpRequest::reduce_op);
  request.def_ro("tag", &OpRequest::tag);
  request.def_ro("root", &OpRequest::root);
  request.def_ro("source", &OpRequest::source_objects, nb::sig("def source(self, /) -> list[NDArray]"),
                 "The arrays, as they were passed in.");
  request.def_ro("target", &OpRequest::target_objects, nb::sig("def target(self, /) -> list[NDArray] | None"));
  request.def_ro("dtypes", &OpRequest::dtypes);
  request.def_ro("retry", &OpRequest::retry);
  request.def_ro("timeout_ns", &OpRequest::timeout);
  request.def_ro("quantisation", &OpRequest::quantisation);
  request.def_ro("again", &OpRequest::again);
  request.def_ro("contribute", &OpRequest::contribute);

  nb::class_<OpResult> result(m, "OpResult", nb::type_slots(op_result_slots), "How an op ended.");
  result.def(
      "__init__",
      [](OpResult* self, int status, const nb::bytes& reason, std::uint32_t epoch, std::vector<PeerId> contributors,
         std::uint64_t registrations, std::uint64_t sent_bytes, std::uint64_t received_bytes) {
        new (self) OpResult{static_cast<OpStatus>(status),
                            from_python(reason),
                            epoch,
                            std::move(contributors),
                            registrations,
                            sent_bytes,
                            received_bytes};
      },
      nb::kw_only(), "status"_a, "reason"_a = nb::bytes("", 0), "epoch"_a = 0, "contributors"_a = nb::tuple(),
      "registrations"_a = 0, "sent_bytes"_a = 0, "received_bytes"_a = 0);
}

void bind_epochs(nb::module_& m) {
  nb::class_<EpochSpec> epoch(m, "EpochSpec", "An epoch as this rank installs it.");
  epoch.def(
      "__init__",
      [](EpochSpec* self, std::uint32_t number, std::uint32_t rank, std::vector<PeerId> members,
         bool evidence_by_master, std::size_t small_bytes, std::size_t segment_bytes, std::uint32_t peers_here,
         bool multipath, std::uint32_t channels, bool direct, std::uint32_t hosts) {
        if (rank >= members.size()) throw nb::value_error("a rank that is no member's");
        if (hosts == 0 || members.size() % hosts != 0 || (hosts > 1 && members.size() < 2 * std::size_t{hosts})) {
          throw nb::value_error("members that are not the same number on every host, two at least");
        }
        const auto size = static_cast<std::uint32_t>(members.size());
        new (self) EpochSpec{number,      rank,          size,       std::move(members), evidence_by_master,
                             small_bytes, segment_bytes, peers_here, multipath,          channels,
                             direct,      hosts};
      },
      nb::kw_only(), "epoch"_a, "rank"_a, "members"_a, "evidence_by_master"_a, "small_bytes"_a, "segment_bytes"_a,
      "peers_here"_a = 1, "multipath"_a = false, "channels"_a = 1, "direct"_a = false, "hosts"_a = 1);
  epoch.def_ro("epoch", &EpochSpec::epoch);
  epoch.def_ro("rank", &EpochSpec::rank);
  epoch.def_ro("members", &EpochSpec::members, "Peer ids, by rank.");
  epoch.def_ro("evidence_by_master", &EpochSpec::evidence_by_master);
  epoch.def_ro("small_bytes", &EpochSpec::small_bytes);
  epoch.def_ro("segment_bytes", &EpochSpec::segment_bytes);
  epoch.def_ro("peers_here", &EpochSpec::peers_here, "Members on this host.");
  epoch.def_ro("multipath", &EpochSpec::multipath);
  epoch.def_ro("channels", &EpochSpec::channels, "Channels that carry ops.");
  epoch.def_ro("direct", &EpochSpec::direct, "Whether Dones go straight to every member that direct lanes lead to.");
  epoch.def_ro("hosts", &EpochSpec::hosts, "Above 1: ops are reduced inside each of so many hosts first.");
  m.attr("MAX_CHANNELS") = max_channels;

  nb::class_<SealedOp> sealed(m, "OpAtSeal", "The state of an op when its epoch was sealed.");
  sealed.def_ro("tag", &SealedOp::tag);
  sealed.def_ro("sequence", &SealedOp::sequence);
  sealed.def_ro("state", &SealedOp::state, "0 unfinished, 1 done, 2 committed.");
  sealed.def_ro("registrations", &SealedOp::registrations);
  sealed.def_prop_ro("payloads", [](const SealedOp& self) { return payloads_to_python(self.payloads); }, "By rank.");
  sealed.def_prop_ro("descriptor", [](const SealedOp& self) { return to_python(raw(self.descriptor)); });

  nb::class_<Verdict> verdict(m, "OpVerdict", "The master's decision about an op of a sealed epoch.");
  verdict.def(
      "__init__",
      [](Verdict* self, std::uint64_t tag, std::uint32_t sequence, std::uint32_t fingerprint, bool commit,
         std::uint64_t registrations, const RawPayloads& payloads, int final, const nb::bytes& reason) {
        new (self)
            Verdict{tag,   sequence,           fingerprint, commit, registrations, payloads_from_python(payloads),
                    final, from_python(reason)};
      },
      nb::kw_only(), "tag"_a, "sequence"_a, "fingerprint"_a, "commit"_a, "registrations"_a, "payloads"_a.none(),
      "final"_a, "reason"_a, "`fingerprint` is that of the op's descriptor, `final` a `Final`.");
  verdict.def_ro("tag", &Verdict::tag);
  verdict.def_ro("sequence", &Verdict::sequence);
  verdict.def_ro("commit", &Verdict::commit);
}

void bind_connections(nb::module_& m) {
  nb::class_<LanePromotion> promotion(m, "LanePromotion", "A connection that becomes a lane.");
  promotion.def(
      "__init__",
      [](LanePromotion* self, ConnId conn, bool outgoing, PeerId peer, std::uint32_t lane, bool shared,
         std::uint32_t path, std::uint32_t paths, std::uint32_t epoch, std::uint32_t channel, bool direct) {
        new (self) LanePromotion{conn, outgoing, peer, lane, {shared, path, paths, epoch, channel, direct}};
      },
      nb::kw_only(), "conn"_a, "outgoing"_a, "peer"_a, "lane"_a, "shared"_a = false, "path"_a = 0, "paths"_a = 1,
      "epoch"_a = 0, "channel"_a = 0, "direct"_a = false,
      "With `epoch` installed already, the lane joins that epoch late.");
  promotion.def_rw("conn", &LanePromotion::conn);

  nb::class_<LaneInfo> lane(m, "LaneInfo", "A lane of the ring.");
  lane.def_rw("conn", &LaneInfo::conn);
  lane.def_ro("outgoing", &LaneInfo::outgoing);
  lane.def_ro("peer", &LaneInfo::peer);
  lane.def_ro("lane", &LaneInfo::lane);
  lane.def_ro("channel", &LaneInfo::channel);
  lane.def_ro("in_memory", &LaneInfo::in_memory, "Whether it goes through shared memory.");
  lane.def_ro("direct", &LaneInfo::direct, "Whether it leads to a member that is no neighbour in the ring.");

  nb::class_<Event> event(m, "EngineEvent", "What happened in the engine. `kind` decides which of the fields are set.");
  event.def_prop_ro("kind", [](const Event& self) { return name_of(self.kind); });
  event.def_rw("conn", &Event::conn, "opened, accepted, message, closed, silent, blocks, sample");
  event.def_ro("peer", &Event::peer, "link_lost, mismatch");
  event.def_ro("outgoing", &Event::outgoing, "link_lost");
  event.def_ro("direct", &Event::direct, "link_lost: of direct lanes");
  event.def_ro("died", &Event::died, "link_lost: the neighbour's process has died, for certain");
  event.def_ro("text", &Event::text, "accepted: the remote address; closed, link_lost: the reason");
  event.def_prop_ro("body", [](const Event& self) { return to_python(self.body); }, "message: its bytes");
  event.def_ro("epoch", &Event::epoch, "mismatch, op_timeout, op_cancelled: in which the op ran");
  event.def_ro("tag", &Event::tag);
  event.def_ro("sequence", &Event::sequence);
  event.def_prop_ro(
      "descriptor", [](const Event& self) { return to_python(self.body); },
      "mismatch, op_timeout: of the call that was made here");
  event.def_prop_ro(
      "other_descriptor", [](const Event& self) { return to_python(self.other); },
      "mismatch: of the call that the neighbour made");
  event.def_ro("waited_ms", &Event::milliseconds, "op_timeout, silent");
  event.def_ro("batch", &Event::batch, "blocks: the number that was passed to expect_blocks");
  event.def_ro("bad", &Event::bad, "blocks: the indices of those with another hash");
  event.def_ro("elapsed_ns", &Event::elapsed, "sample: since the first filler");
  event.def_ro("counted_ns", &Event::counted, "sample: when `received_bytes` had come");
  event.def_ro("received_bytes", &Event::bytes, "sample: filler after the first, until `counted_ns`");
  event.def("__repr__", [](const Event& self) {
    return std::string("<EngineEvent ") + name_of(self.kind) + " of connection " + std::to_string(self.conn) + ">";
  });
}

}  // namespace

void bind_structs(nb::module_& m) {
  bind_ops(m);
  bind_epochs(m);
  bind_connections(m);
}

}  // namespace ringfold
