// Epochs: sealing one, settling its ops by verdicts, and installing the next.
#include <algorithm>
#include <cassert>
#include <new>

#include "ringfold/core.hpp"

namespace ringfold {
namespace {

constexpr std::size_t max_refused = 65'536;  // calls that others were refused and this peer never makes

}  // namespace

std::vector<SealedOp> Core::seal(std::uint32_t epoch) {
  std::vector<SealedOp> out;
  if (epoch != spec_.epoch) return out;
  if (!planted_.done_after_seal) sealed_ = true;
  for (const auto& [number, tag] : tags_) {
    if (tag.has_committed) {
      out.push_back(
          {number, tag.committed, 2, tag.committed_registrations, tag.committed_payloads, tag.committed_descriptor});
    }
    if (tag.running) {
      const bool done = tag.running->state == OpState::done;
      out.push_back({number, tag.running->sequence, done ? 1 : 0, tag.running->registrations, std::nullopt,
                     tag.running->descriptor});
    }
  }
  std::sort(out.begin(), out.end(), [](const SealedOp& a, const SealedOp& b) {
    return std::tie(a.tag, a.sequence) < std::tie(b.tag, b.sequence);
  });
  return out;
}

void Core::settle(Ns, std::uint32_t epoch, const std::vector<Verdict>& verdicts, const Bytes& default_reason) {
  if (epoch != spec_.epoch) return;
  sealed_ = true;
  for (const OpPtr& op : std::vector<OpPtr>(running_)) {
    const auto verdict = std::find_if(verdicts.begin(), verdicts.end(), [&](const Verdict& v) {
      return v.tag == op->spec.tag && v.sequence == op->sequence && v.fingerprint == op->fingerprint;
    });
    const bool decided = verdict != verdicts.end();
    if (decided && verdict->commit) {
      op->registrations = verdict->registrations;
      if (op->small && verdict->payloads) op->payloads = *verdict->payloads;
      if (op->small ? op->payloads_fit() : op->state == OpState::done) {
        commit(op);
        continue;
      }
    }
    undo(op);
    if (op->spec.retry == Retry::engine && !(decided && verdict->final)) {
      op->state = OpState::waiting;
      std::erase(running_, op);
      waiting_.push_back(op);
      ++stats_.restarted;
    } else {
      finish(op, OpStatus::aborted, decided ? verdict->reason : default_reason);
    }
  }
  forget_tags();
  std::sort(waiting_.begin(), waiting_.end(), [](const OpPtr& a, const OpPtr& b) { return a->id < b->id; });
}

// A call that ended without success ends so for every member: one that is late for it must not take the others' next
// call for it.
void Core::refuse(const CallName& name, Bytes reason) {
  const std::uint64_t tag = std::get<0>(name), step = std::get<1>(name);
  const std::uint32_t call = std::get<2>(name);
  const auto late = std::find_if(waiting_.begin(), waiting_.end(), [&](const OpPtr& op) {
    return op->spec.tag == tag && op->spec.step == step && op->spec.call == call;
  });
  if (late != waiting_.end()) {
    const OpPtr op = *late;  // NOLINT(performance-unnecessary-copy-initialization): `finish` removes it from waiting_
    op->epoch = spec_.epoch;
    finish(op, OpStatus::aborted, std::move(reason));
    return;
  }
  const auto counted = calls_.find(tag);
  // The last call counts as one that may come: its caller may be about to make another attempt.
  const bool is_past = step == step_ ? counted != calls_.end() && call + 1 < counted->second
                                     : step != no_step && step_ != no_step && step < step_;
  if (is_past || refused_.size() >= max_refused) return;
  refused_.emplace(name, RefusedCall{spec_.epoch, std::move(reason)});
}

void Core::set_step(std::uint64_t step) {
  if (step == step_) return;
  // Members that are ahead may have been refused calls of this step, or of later ones. What is earlier is past.
  const bool is_back = step_ != no_step && step < step_;
  std::erase_if(refused_, [&](const auto& refused) {
    const std::uint64_t its = std::get<1>(refused.first);
    return its == no_step ? step != no_step : step == no_step || is_back || its < step;
  });
  step_ = step;
  calls_.clear();
}

void Core::restart_calls() {
  refused_.clear();
  calls_.clear();
}

// Early segments belong to the epoch: after it they are counted no more.
void Core::forget_tags() {
  tags_.clear();
  called_tags_ = 0;
  for (const bool direction : {false, true}) {
    early_sent_[direction] = early_received_[direction] = stashed_segments_[direction] = 0;
  }
}

void Core::mark(Conn& conn) {
  FrameHeader mark;
  mark.epoch = spec_.epoch;
  conn.mark_sent = spec_.epoch;
  lane_frame(conn, mark, {});
}

void Core::install(Ns now, EpochSpec spec) {
  assert(running_.empty());
  spec_ = std::move(spec);
  spec_.segment_bytes = std::max<std::size_t>((spec_.segment_bytes + 63) / 64 * 64, 64);
  sealed_ = false;
  for (auto& bytes : path_bytes_) bytes.fill(0);
  for (auto& shares : credited_shares_) shares.fill(0);  // the links may lead elsewhere
  largest_segment_ = 0;
  best_out_rate_ = 0;  // the next heartbeat is about another link
  forget_tags();
  std::vector<ConnId> unheld;
  for (auto& [id, conn] : conns_) {
    if (conn.role != Role::lane) continue;
    conn.last_received = conn.last_acknowledged = now;
    conn.confirmed += conn.flights.size();  // of an epoch that is over: they are not needed any more
    conn.flights.clear();
    mark(conn);
    if (conn.held && conn.mark_seen <= spec_.epoch) unheld.push_back(id);
  }
  const std::vector<OpPtr> again = std::exchange(waiting_, {});
  for (const OpPtr& op : again) {
    try {
      start(now, op);
    } catch (const std::bad_alloc&) {
      finish(op, OpStatus::failed, {});  // the others go on without it; its caller gets the failure
    }
  }
  for (const ConnId id : unheld) resume(now, id);
}

std::vector<std::pair<std::uint64_t, std::uint32_t>> Core::progress() const {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> out;
  for (const auto& [number, tag] : tags_) {
    if (tag.has_committed) out.emplace_back(number, tag.committed + 1);
  }
  std::sort(out.begin(), out.end());
  return out;
}

void Core::fail_all(OpStatus status, Bytes reason) {
  over_ = true;
  over_status_ = status;
  over_reason_ = std::move(reason);
  sealed_ = true;
  for (const OpPtr& op : std::vector<OpPtr>(running_)) {
    undo(op);
    finish(op, status, over_reason_);
  }
  for (const OpPtr& op : std::vector<OpPtr>(waiting_)) finish(op, status, over_reason_);
}

}  // namespace ringfold
