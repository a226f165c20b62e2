// The parts of the core, each by itself: buffers, lanes, credits, names of calls, heartbeats, plans and channels.
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "ringfold/call_names.hpp"
#include "ringfold/channel.hpp"
#include "ringfold/control_channel.hpp"
#include "ringfold/message_connection.hpp"

using namespace ringfold;

namespace {

constexpr Ns millisecond = 1'000'000;

struct TextFrame {
  std::string text;
  std::size_t sent = 0, total = 0;

  explicit TextFrame(std::string given) : text(std::move(given)), total(text.size()) {}
  template <typename Add>
  void visit(Add add) const {
    const auto* at = reinterpret_cast<const std::byte*>(text.data());
    const std::size_t half = text.size() / 2;
    add(at, half);
    add(at + half, text.size() - half);
  }
};

std::string gathered(const SendQueue<TextFrame>& queue, std::size_t most) {
  std::vector<iovec> pieces(most);
  const std::size_t count = queue.gather(pieces.data(), most);
  std::string out;
  for (std::size_t i = 0; i < count; ++i) out.append(static_cast<const char*>(pieces[i].iov_base), pieces[i].iov_len);
  return out;
}

OpSpec sum_of(std::vector<float>& values) {
  OpSpec spec;
  spec.timeout = 1;
  auto* at = reinterpret_cast<std::byte*>(values.data());
  spec.spans.push_back({at, at, values.size() * sizeof(float), kernels::DType::f32, 0});
  return spec;
}

// A channel of rank 0 of a ring of two, with one lane each way, and the bytes that the neighbour sends.
class Alone {
 public:
  explicit Alone(std::size_t small_bytes = 0) {
    epoch.install({1, 0, 2, {10, 20}, false, small_bytes, 256});
    for (const bool outgoing : {true, false}) {
      Connection conn;
      conn.id = outgoing ? 1 : 2;
      channel.add_lane(0, Lane(std::move(conn), outgoing, 20, 0, {}));
    }
    channel.install(0);
    FrameHeader mark;
    mark.epoch = 1;
    give(mark, {});
  }

  void give(FrameHeader header, const Bytes& payload) {
    header.length = static_cast<std::uint32_t>(payload.size());
    header.payload_crc = crc32c(payload.data(), payload.size());
    header.header_crc = header.crc();
    Bytes bytes(sizeof header + payload.size());
    std::memcpy(bytes.data(), &header, sizeof header);
    if (!payload.empty()) std::memcpy(bytes.data() + sizeof header, payload.data(), payload.size());
    give(bytes);
  }
  void give(const Bytes& bytes) {
    for (std::size_t at = 0; at < bytes.size();) {
      const auto space = channel.receive_space(2);
      const std::size_t count = std::min(space.size(), bytes.size() - at);
      std::memcpy(space.data(), bytes.data() + at, count);
      at += count;
      channel.received(0, 2, count);
    }
  }
  // Everything that the lane to the next peer has to send.
  Bytes sent() {
    Bytes bytes;
    iovec pieces[16];
    while (const std::size_t count = channel.gather(1, pieces, 16)) {
      std::size_t taken = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const auto* at = static_cast<const std::byte*>(pieces[i].iov_base);
        bytes.insert(bytes.end(), at, at + pieces[i].iov_len);
        taken += pieces[i].iov_len;
      }
      channel.sent(0, 1, taken);
    }
    return bytes;
  }

  OpPtr start(std::vector<float>& values) {
    auto op = std::make_shared<Op>(1, sum_of(values));
    op->start({0, 2, epoch.spec().small_bytes, 256, false}, 0, pool);
    op->epoch = 1;
    channel.begin(0, op->parts.front());
    return op;
  }

  BackupPool pool;
  EpochState epoch;
  ShareSources advice;
  Planted planted;
  Channel channel{0, epoch, advice, planted};
};

}  // namespace

TEST(a_receive_buffer_keeps_what_is_not_used_and_moves_it_only_for_want_of_space) {
  ReceiveBuffer buffer;
  auto space = buffer.space(8);
  std::memcpy(space.data(), "abcdefgh", 8);
  buffer.filled(8);
  buffer.consume(5);
  CHECK(buffer.size() == 3 && std::memcmp(buffer.data(), "fgh", 3) == 0);
  space = buffer.space(4);
  std::memcpy(space.data(), "ijkl", 4);
  buffer.filled(4);
  CHECK(buffer.size() == 7 && std::memcmp(buffer.data(), "fghijkl", 7) == 0);
}

TEST(a_send_queue_gathers_what_is_left_and_reports_what_is_through) {
  SendQueue<TextFrame> queue;
  queue.push(TextFrame("abcdef"));
  queue.push(TextFrame("ghij"));
  CHECK(queue.bytes() == 10 && gathered(queue, 16) == "abcdefghij");
  std::string through;
  queue.sent(4, [&](const TextFrame& frame, std::size_t) { through += frame.text; });
  CHECK(through.empty() && gathered(queue, 16) == "efghij");
  queue.push_before(TextFrame("!"), [](const TextFrame&) { return true; });
  CHECK(gathered(queue, 16) == "ef!ghij");  // not before a frame that has begun
  CHECK(gathered(queue, 2) == "ef");        // too few pieces for another whole frame
  queue.sent(4, [&](const TextFrame& frame, std::size_t left) { through += frame.text + std::to_string(left); });
  CHECK(through == "abcdef2!1");
  queue.erase_if([](const TextFrame& frame) { return frame.sent > 0; });
  CHECK(queue.empty() && queue.bytes() == 0);
}

TEST(a_lane_has_the_rate_at_which_its_bytes_are_acknowledged) {
  LaneMeter meter;
  meter.begin(0);
  Ns now = 0;
  for (int i = 0; i < 100; ++i) {
    now += millisecond;
    meter.sent(now, 10'000);
    meter.acknowledged(now, 20'000, 100'000, 100'000, true, true);
  }
  CHECK(meter.rate() > 0.009 && meter.rate() < 0.011);  // 10,000 bytes a millisecond
  CHECK(meter.recent_rate(now) > 9'000'000 && meter.recent_rate(now + 2'000 * millisecond) == 0);
  CHECK(meter.stalled() == 0 && !meter.is_silent());
}

TEST(a_lane_that_acknowledges_nothing_is_silent_but_not_while_its_observer_sleeps) {
  LaneMeter meter;
  meter.begin(0);
  meter.sent(0, 100'000);
  meter.acknowledged(10 * millisecond, 100'000, 0, 0, true, true);
  CHECK(!meter.is_silent());  // however late it is asked: nothing is known since this query
  meter.acknowledged(25 * millisecond, 100'000, 0, 0, true, true);
  CHECK(meter.is_silent() && meter.stalled() == 25 * millisecond);
  meter.acknowledged(26 * millisecond, 99'000, 0, 0, true, true);
  CHECK(!meter.is_silent());
}

TEST(a_short_frame_that_nothing_follows_may_be_acknowledged_late) {
  LaneMeter meter;
  meter.begin(0);
  meter.sent(0, 64);
  meter.acknowledged(40 * millisecond, 64, 0, 0, false, true);
  CHECK(meter.stalled() == 40 * millisecond && meter.silent() == 0);
}

TEST(flights_are_kept_until_the_other_side_reports_them) {
  Flights flights;
  for (int i = 0; i < 3; ++i) {
    OutFrame frame = OutFrame::control({}, Bytes(100));
    flights.note_sent(frame, 164 * (i + 1));
  }
  OutFrame report;
  report.header.kind = LaneFrame::applied;
  flights.note_sent(report, 500);  // not counted
  CHECK(flights.sent() == 3 && flights.applied(2) && flights.all().size() == 1);
  CHECK(!flights.applied(4));
  CHECK(!flights.are_too_many(1'000) && flights.are_too_many(std::uint64_t{2} << 30));
  flights.forget();
  CHECK(flights.sent() == 3 && flights.all().empty() && flights.applied(3));
}

TEST(a_receiver_reports_after_enough_frames_or_bytes) {
  Flights flights;
  CHECK(!flights.came(100) && flights.came(128 * 1024) && flights.report() == 2);
  for (int i = 0; i < 63; ++i) CHECK(!flights.came(0));
  CHECK(flights.came(0) && flights.report() == 66);
}

TEST(credits_follow_fixed_shares) {
  PathCredits credits;
  PathShares advice;
  advice.share[0] = 3;
  advice.share[1] = 1;
  std::array<bool, max_paths> earns{};
  earns[0] = earns[1] = true;
  credits.charge(advice, earns, 0, 400);
  CHECK(credits.of(advice, 0) == -100 && credits.of(advice, 1) == 100);
  credits.charge(advice, earns, 1, 400);
  CHECK(credits.of(advice, 0) == 200 && credits.of(advice, 1) == -200);
  credits.limit(50);
  CHECK(credits.of(advice, 0) == 50 && credits.of(advice, 1) == -50);
  earns[1] = false;  // it has no lane: it earns nothing, and begins with the others when it is back
  credits.charge(advice, earns, 0, 400);
  CHECK(credits.of(advice, 1) == 0 && credits.of(advice, 0) == 50);
  PathShares other = advice;
  other.share[1] = 2;
  CHECK(credits.of(other, 0) == 0);
}

TEST(a_call_has_the_name_that_every_member_counts) {
  CallNames names;
  OpSpec first, second, again;
  names.set_step(7);
  names.name(first);
  names.name(second);
  CHECK(first.step == 7 && first.call == 0 && second.call == 1);
  again.again = true;
  names.name(again);
  CHECK(again.call == 1);
  names.forget(second);
  names.refuse({0, 7, 1}, {3, Bytes(1)});
  OpSpec late;
  names.name(late);
  const auto refusal = names.take_refusal(late);
  CHECK(refusal && refusal->epoch == 3 && !names.take_refusal(late));
  names.refuse({0, 7, 0}, {3, {}});  // a call that was made long ago
  CHECK(!names.take_refusal(first));
  names.set_step(8);
  OpSpec next;
  names.name(next);
  CHECK(next.step == 8 && next.call == 0);
  bool is_refused = false;
  OpSpec never;
  never.tag = 99;
  never.again = true;
  try {
    names.name(never);
  } catch (const std::invalid_argument&) {
    is_refused = true;
  }
  CHECK(is_refused);
}

TEST(the_master_is_silent_when_it_sends_nothing_or_echoes_nothing) {
  ControlChannel control;
  control.open(0, 5, 100 * millisecond, 1'000 * millisecond);
  CHECK(control.is_due(0) && control.beat(0) == std::pair(std::uint64_t{1}, std::uint64_t{0}));
  CHECK(control.next_deadline() == 100 * millisecond && !control.is_due(99 * millisecond));
  Bytes heartbeat;
  put(heartbeat, std::uint64_t{4});
  put(heartbeat, std::uint64_t{1});
  CHECK(control.on_heartbeat(500 * millisecond, heartbeat.data(), heartbeat.size()));
  CHECK(!control.on_heartbeat(500 * millisecond, heartbeat.data(), 15));
  control.frame_came(1'600 * millisecond);  // it sends, but does not hear us
  CHECK(control.new_silence(1'600 * millisecond) == 1'100 * millisecond);
  CHECK(!control.new_silence(1'700 * millisecond));  // reported once
  control.shift(5'000 * millisecond);
  CHECK(control.beat(0).second == 4 && !control.is_echo_late(5'600 * millisecond));
  control.acknowledged(5'900 * millisecond, 1'000, 10);
  CHECK(!control.is_echo_late(6'000 * millisecond) && control.is_echo_late(6'200 * millisecond));
}

TEST(a_message_is_taken_whole_and_a_wrong_head_is_named) {
  MessageConnection conn;
  const Bytes body(10);
  conn.queue(ControlFrame::message, body.data(), body.size());
  iovec piece;
  CHECK(conn.tx.gather(&piece, 1) == 0 && conn.tx.bytes() == 15);
  iovec pieces[2];
  CHECK(conn.tx.gather(pieces, 2) == 1 && pieces[0].iov_len == 15);
  std::string why;
  for (std::size_t at = 0; at < 15; ++at) {
    CHECK(!conn.next_frame(why) && why.empty());
    std::memcpy(conn.rx.space(1).data(), static_cast<const std::byte*>(pieces[0].iov_base) + at, 1);
    conn.rx.filled(1);
  }
  const auto frame = conn.next_frame(why);
  CHECK(frame && frame->kind == ControlFrame::message && frame->bytes == 10 && conn.rx.size() == 0);
  std::memset(conn.rx.space(5).data(), 0xff, 5);
  conn.rx.filled(5);
  CHECK(!conn.next_frame(why) && why.find("4294967295 bytes") != std::string::npos);
}

// Slices of plans: together they are the plan, and none shares a byte with another.
TEST(slices_cover_every_chunk_once) {
  for (const OpKind kind : {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::all_gather, OpKind::broadcast}) {
    for (const std::uint32_t size : {2u, 3u, 4u, 8u}) {
      for (const bool quantised : {false, true}) {
        for (const std::size_t bytes : {std::size_t{0}, std::size_t{64} * size, std::size_t{40'000} * size}) {
          if (quantised && kind != OpKind::all_reduce) continue;
          const Plan whole = make_plan(kind, bytes, 1, size, 0, 4096, quantised);
          for (const std::uint32_t of : {1u, 2u, 3u, 4u}) {
            std::vector<std::size_t> at(whole.chunks.size());
            std::size_t received = 0;
            for (std::size_t i = 0; i < at.size(); ++i) at[i] = whole.chunks[i].begin;
            for (std::uint32_t number = 0; number < of; ++number) {
              const Plan slice = make_plan(kind, bytes, 1, size, 0, 4096, quantised, {number, of});
              CHECK(slice.receives.size() == whole.receives.size());
              received += std::accumulate(slice.bytes_from.begin(), slice.bytes_from.end(), std::size_t{0});
              for (std::size_t i = 0; i < at.size(); ++i) {
                CHECK(slice.chunks[i].begin == at[i] && slice.chunks[i].end >= at[i]);
                CHECK((slice.chunks[i].end - whole.chunks[i].begin) % 64 == 0 ||
                      slice.chunks[i].end == whole.chunks[i].end);
                at[i] = slice.chunks[i].end;
                // The blocks of a quantised segment must not depend on the number of slices.
                if (quantised) {
                  CHECK(slice.segment_bytes == whole.segment_bytes);
                  CHECK((slice.chunks[i].begin - whole.chunks[i].begin) % whole.segment_bytes == 0 ||
                        slice.chunks[i].begin == whole.chunks[i].end);
                }
              }
            }
            for (std::size_t i = 0; i < at.size(); ++i) CHECK(at[i] == whole.chunks[i].end);
            CHECK(received == std::accumulate(whole.bytes_from.begin(), whole.bytes_from.end(), std::size_t{0}));
          }
        }
      }
    }
  }
}

TEST(a_channel_applies_segments_and_reports_a_part_that_has_all) {
  Alone alone;
  std::vector<float> values(100, 1);  // 400 bytes: two segments, of 256 and 144 bytes
  const OpPtr op = alone.start(values);
  alone.channel.replay(op->parts.front());
  CHECK(alone.channel.has_dirty());
  FrameHeader header = op->header(LaneFrame::data);
  header.contributors = 1;
  std::vector<float> theirs(64, 2);
  const auto* at = reinterpret_cast<const std::byte*>(theirs.data());
  alone.give(header, Bytes(at, at + 256));
  CHECK(!alone.channel.has_reports() && values[0] == 3 && values[63] == 3 && values[64] == 1);
  header.offset = 256;
  alone.give(header, Bytes(at, at + 144));
  const auto reports = alone.channel.take_reports();
  CHECK(reports.size() == 1 && reports[0].kind == Report::Kind::parts_finished && values[99] == 3);
  CHECK(op->parts_finished() && op->local_part_finished());
  alone.give(header, Bytes(at, at + 144));  // again: no second report, no second reduction
  CHECK(!alone.channel.has_reports() && values[99] == 3 && alone.channel.stats().duplicates == 1);
  op->restore();
  CHECK(values[0] == 1 && values[99] == 1);
}

TEST(a_channel_keeps_what_comes_early_and_hands_frames_about_the_op_to_the_core) {
  Alone alone;
  std::vector<float> values(100, 1);
  const OpPtr probe = std::make_shared<Op>(1, sum_of(values));
  FrameHeader done;
  done.kind = LaneFrame::done;
  done.epoch = 1;
  done.fingerprint = probe->fingerprint;
  done.origin = 1;
  alone.give(done, {});
  CHECK(!alone.channel.has_reports());  // the op is not called here yet
  const OpPtr op = alone.start(values);
  alone.channel.replay(op->parts.front());
  const auto reports = alone.channel.take_reports();
  CHECK(reports.size() == 1 && reports[0].kind == Report::Kind::op_frame && reports[0].header.origin == 1);
}

TEST(after_the_end_of_a_part_no_lane_reads_the_callers_memory) {
  Alone alone;
  auto values = std::make_unique<std::vector<float>>(100, 1.0f);
  const OpPtr op = alone.start(*values);
  const PartPtr part = op->parts.front();
  alone.channel.replay(part);
  iovec pieces[8];
  CHECK(alone.channel.gather(1, pieces, 8) > 0);
  alone.channel.sent(0, 1, 64 + 64 + 8);  // the mark, and a segment that has begun
  alone.channel.end(part, false);
  values.reset();
  const Bytes rest = alone.sent();  // ASan sees a read of what is gone
  CHECK(rest.size() == 256 - 8);    // of the segment that has begun, and nothing of the next one
  for (std::size_t at = 0; at < rest.size(); at += sizeof(float)) {
    float value = 0;
    std::memcpy(&value, rest.data() + at, sizeof value);
    CHECK(value == 1);
  }
}

TEST(a_neighbour_that_breaks_the_protocol_loses_its_link_once) {
  for (const int kind : {0, 1, 2}) {
    Alone alone;
    FrameHeader header;
    header.epoch = 1;
    header.kind = kind == 0 ? LaneFrame::mark : kind == 1 ? static_cast<LaneFrame>(99) : LaneFrame::ready;
    if (kind == 2) header.epoch = 2;  // without its mark
    alone.give(header, {});
    const auto reports = alone.channel.take_reports();
    CHECK(reports.size() == 1 && reports[0].kind == Report::Kind::link_lost && !reports[0].text.empty());
    CHECK(!alone.channel.has(2) && alone.channel.has(1) && alone.channel.stats().lane_violations == 1);
    CHECK(alone.channel.take_closing() == std::vector<ConnId>{2});
  }
}
