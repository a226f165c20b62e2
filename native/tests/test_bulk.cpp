// Bulk connections between two cores, the bytes moved in odd pieces: blocks, messages, filler, samples, loss and lies.
#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "ringfold/core.hpp"
#include "ringfold/hash.hpp"

using namespace ringfold;

namespace {

constexpr Ns millisecond = 1'000'000;

// Two cores with one connection between them, past its handshake.
class Visit {
 public:
  explicit Visit(unsigned seed = 1, std::size_t most = 700) : rng_(seed), most_(most) {
    a = left.open("b", false);
    b = right.open("a", true);
    left.make_bulk(now, a);
    right.make_bulk(now, b);
    events(right);
  }

  // Moves one piece each way; false when nothing wants to move.
  bool move() {
    const bool there = carry(left, a, right, b);
    return carry(right, b, left, a) || there;
  }
  void run() {
    while (move()) {
    }
  }
  bool carry(Core& from, ConnId source, Core& to, ConnId target) {
    const auto space = to.receive_space(target);
    iovec pieces[8];
    const std::size_t count = space.empty() ? 0 : from.gather(source, pieces, 8);
    if (count == 0) return false;
    const std::size_t limit = std::uniform_int_distribution<std::size_t>(1, most_)(rng_);
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count && bytes < std::min(limit, space.size()); ++i) {
      const std::size_t step = std::min({pieces[i].iov_len, limit - bytes, space.size() - bytes});
      std::memcpy(space.data() + bytes, pieces[i].iov_base, step);
      bytes += step;
    }
    from.sent(now, source, bytes);
    to.received(now, target, bytes);
    moved += bytes;
    return true;
  }

  static std::vector<Event> events(Core& core) {
    std::vector<Event> out;
    while (auto event = core.next_event()) out.push_back(std::move(*event));
    return out;
  }

  Core left, right;
  ConnId a = 0, b = 0;
  Ns now = 1;
  std::size_t moved = 0;

 private:
  std::mt19937 rng_;
  std::size_t most_;
};

Bytes content(std::size_t bytes, unsigned seed) {
  std::mt19937 rng(seed);
  Bytes out(bytes);
  for (std::byte& each : out) each = static_cast<std::byte>(rng());
  return out;
}

Block whole(Bytes& memory, bool hashed = true) {
  Block block{memory.data(), memory.size()};
  if (hashed) block.hash = hash_block(memory.data(), memory.size());
  return block;
}

MemoryOwner keep() { return std::make_shared<int>(0); }

void send_text(Core& core, ConnId conn, const std::string& words) { core.send(conn, words.data(), words.size()); }

std::string words(const Event& event) { return {reinterpret_cast<const char*>(event.body.data()), event.body.size()}; }

// A frame as another implementation would write it.
Bytes frame(std::uint32_t length, int kind, std::size_t body) {
  Bytes out;
  put(out, length);
  put(out, static_cast<std::uint8_t>(kind));
  out.resize(out.size() + body, std::byte{7});
  return out;
}

// Feeds bytes to a core as a shell does; stops when the connection is gone.
void feed(Core& core, ConnId conn, const Bytes& bytes, Ns now = 1) {
  for (std::size_t at = 0; at < bytes.size();) {
    const auto space = core.receive_space(conn);
    if (space.empty()) return;
    const std::size_t step = std::min(space.size(), bytes.size() - at);
    std::memcpy(space.data(), bytes.data() + at, step);
    core.received(now, conn, step);
    at += step;
  }
}

TEST(blocks_of_all_sizes_arrive_in_their_batches) {
  for (const std::size_t most : {3ul, 700ul, 300'000ul}) {
    Visit visit(5, most);
    const std::size_t scale = most == 3 ? 64 : 1;  // one byte at a time takes long
    std::vector<Bytes> sent, got;
    for (const std::size_t bytes : {1ul, 5ul, 64ul, 65'535ul, 65'536ul, 65'537ul, 1'000'003ul, 2ul}) {
      sent.push_back(content((bytes + scale - 1) / scale, static_cast<unsigned>(bytes)));
      got.emplace_back(sent.back().size());
    }
    std::vector<Block> out, in;
    for (std::size_t i = 0; i < sent.size(); ++i) {
      out.push_back(whole(sent[i]));
      in.push_back({got[i].data(), got[i].size(), out.back().hash});
    }
    const std::vector<Block> first(in.begin(), in.begin() + 5), rest(in.begin() + 5, in.end());
    visit.right.expect_blocks(visit.b, 10, first, keep());
    visit.right.expect_blocks(visit.b, 11, rest, keep());
    visit.left.send_blocks(1, visit.a, out, keep());
    visit.run();
    CHECK(got == sent);
    const auto events = Visit::events(visit.right);
    CHECK(events.size() == 2);
    for (std::size_t i = 0; i < events.size(); ++i) {
      CHECK(events[i].kind == Event::Kind::blocks && events[i].batch == 10 + i && events[i].bad.empty());
    }
  }
}

TEST(a_large_block_is_read_straight_into_its_memory) {
  Visit visit;
  Bytes sent = content(200'000, 1), got(200'000);
  visit.right.expect_blocks(visit.b, 1, {{got.data(), got.size(), std::nullopt}}, keep());
  CHECK(visit.right.receive_space(visit.b).size() == control_head_bytes);
  feed(visit.right, visit.b, frame(200'001, 4, 0));
  CHECK(visit.right.receive_space(visit.b).data() == got.data());
  CHECK(visit.right.receive_space(visit.b).size() == got.size());
}

TEST(messages_keep_their_place_between_blocks) {
  Visit visit(3);
  Bytes one = content(3'000, 1), two = content(70'000, 2), in_one(3'000), in_two(70'000);
  visit.right.expect_blocks(visit.b, 1, {{in_one.data(), in_one.size(), std::nullopt}}, keep());
  visit.right.expect_blocks(visit.b, 2, {{in_two.data(), in_two.size(), std::nullopt}}, keep());
  send_text(visit.left, visit.a, "before");
  visit.left.send_blocks(1, visit.a, {whole(one)}, keep());
  send_text(visit.left, visit.a, "between");
  visit.left.send_blocks(1, visit.a, {whole(two)}, keep());
  send_text(visit.left, visit.a, "");
  visit.run();
  const auto events = Visit::events(visit.right);
  CHECK(events.size() == 5);
  if (events.size() != 5) return;
  CHECK(words(events[0]) == "before" && words(events[2]) == "between" && words(events[4]).empty());
  CHECK(events[1].batch == 1 && events[3].batch == 2);
  CHECK(in_one == one && in_two == two);
}

TEST(wrong_content_is_named_by_its_index) {
  Visit visit;
  Bytes sent = content(900, 1), got(900);
  std::vector<Block> out, in;
  for (std::size_t i = 0; i < 3; ++i) {
    out.push_back({sent.data() + 300 * i, 300, std::nullopt});
    in.push_back({got.data() + 300 * i, 300, hash_block(sent.data() + 300 * i, 300)});
  }
  in[1].hash = *in[1].hash ^ 1;
  visit.right.expect_blocks(visit.b, 7, in, keep());
  visit.left.send_blocks(1, visit.a, out, keep());
  visit.run();
  const auto events = Visit::events(visit.right);
  CHECK(events.size() == 1 && events[0].bad == std::vector<std::uint32_t>{1});
  CHECK(differing(in) == std::vector<std::uint32_t>{1});
}

TEST(a_protocol_violation_closes_the_connection_with_a_reason) {
  const std::vector<std::pair<Bytes, std::string>> lies = {
      {frame(11, 4, 10), "a block of 10 bytes where 100 were requested"},
      {frame(0, 0, 0), "a frame of 0 bytes"},
      {frame(max_bulk_bytes + 1, 0, 0), "a frame of"},
      {frame(max_filler_bytes + 2, 5, 0), "a frame of"},
      {frame(17, 1, 16), "unexpected frame kind 1"},
      {frame(9, 6, 8), "unexpected frame kind 6"},
  };
  for (const auto& [bytes, why] : lies) {
    Core core;
    const ConnId conn = core.open("peer", false);
    core.make_bulk(1, conn);
    Bytes got(100, std::byte{1});
    const MemoryOwner held = keep();
    core.expect_blocks(conn, 1, {{got.data(), got.size(), std::nullopt}}, held);
    feed(core, conn, bytes);
    const auto event = core.next_event();
    CHECK_MESSAGE(event && event->kind == Event::Kind::closed && event->text.starts_with(why), "%s: %s", why.c_str(),
                  event ? event->text.c_str() : "no event");
    CHECK(core.take_closing() == std::vector<ConnId>{conn});
    CHECK(held.use_count() == 1 && got == Bytes(100, std::byte{1}));
  }
  Core core;
  const ConnId conn = core.open("peer", false);
  core.make_bulk(1, conn);
  feed(core, conn, frame(11, 4, 10));
  const auto event = core.next_event();
  CHECK(event && event->text == "a block that was not requested");
}

TEST(a_lost_connection_writes_nothing_more_and_releases_the_memory) {
  Visit visit(4);
  Bytes sent = content(50'000, 1), got(50'000);
  const MemoryOwner out = keep(), in = keep();
  visit.right.expect_blocks(visit.b, 1, {{got.data(), got.size(), std::nullopt}}, in);
  visit.left.send_blocks(1, visit.a, {whole(sent)}, out);
  while (visit.moved < 20'000) visit.move();
  CHECK(in.use_count() == 2 && out.use_count() == 2);
  visit.right.lost(1, visit.b, "cut");
  visit.left.lost(1, visit.a, "cut");
  CHECK(in.use_count() == 1 && out.use_count() == 1);
  CHECK(visit.right.receive_space(visit.b).empty());
  const auto events = Visit::events(visit.right);
  CHECK(events.size() == 1 && events[0].kind == Event::Kind::closed && events[0].text == "cut");
  visit.right.expect_blocks(visit.b, 2, {{got.data(), got.size(), std::nullopt}}, in);  // ignored: it is gone
  CHECK(in.use_count() == 1);
}

TEST(memory_is_released_as_soon_as_its_blocks_are_through) {
  Visit visit(4);
  Bytes sent = content(5'000, 1), got(5'000);
  const MemoryOwner out = keep(), in = keep();
  visit.right.expect_blocks(visit.b, 1, {{got.data(), got.size(), std::nullopt}}, in);
  visit.left.send_blocks(1, visit.a, {whole(sent)}, out);
  visit.run();
  CHECK(in.use_count() == 1 && out.use_count() == 1);
}

TEST(a_closed_connection_still_sends_its_queued_messages) {
  Visit visit(6);
  Bytes sent = content(50'000, 1), got(50'000);
  const Bytes original = sent;
  const MemoryOwner out = keep();
  visit.right.expect_blocks(visit.b, 1, {{got.data(), got.size(), std::nullopt}}, keep());
  visit.left.send_blocks(1, visit.a, {whole(sent)}, out);
  visit.left.fill(visit.a, true);
  while (visit.moved < 10'000) visit.move();
  visit.left.send_blocks(1, visit.a, {whole(sent)}, out);
  send_text(visit.left, visit.a, "farewell");
  visit.left.close(visit.a);
  CHECK(out.use_count() == 1);
  sent.assign(sent.size(), std::byte{0});  // the memory is the caller's again
  visit.run();
  const auto events = Visit::events(visit.right);
  CHECK(events.size() == 2 && events[0].kind == Event::Kind::blocks && words(events[1]) == "farewell");
  CHECK(got == original);
  CHECK(visit.left.take_closing() == std::vector<ConnId>{visit.a});
}

TEST(closing_does_not_wait_for_blocks_and_filler) {
  Visit visit(6);
  Bytes sent = content(50'000, 1), got(50'000);
  visit.right.expect_blocks(visit.b, 1, {{got.data(), got.size(), std::nullopt}}, keep());
  visit.left.send_blocks(1, visit.a, {whole(sent), whole(sent)}, keep());
  while (visit.moved < 10'000) visit.move();
  visit.left.close(visit.a);
  CHECK(visit.left.take_closing() == std::vector<ConnId>{visit.a});
}

TEST(a_closing_receiver_writes_nothing_more) {
  Visit visit(6);
  Bytes sent = content(50'000, 1), got(50'000);
  const MemoryOwner in = keep();
  visit.right.expect_blocks(visit.b, 1, {{got.data(), got.size(), std::nullopt}}, in);
  visit.left.send_blocks(1, visit.a, {whole(sent)}, keep());
  while (visit.moved < 10'000) visit.move();
  send_text(visit.right, visit.b, "enough");
  visit.right.close(visit.b);
  CHECK(in.use_count() == 1 && visit.right.receive_space(visit.b).empty());
}

TEST(messages_go_before_filler_that_has_not_begun) {
  Visit visit(2, 10'000);
  visit.left.fill(visit.a, true);
  CHECK(visit.left.take_filling() == std::vector<ConnId>{visit.a});
  while (visit.moved < 100'000) visit.move();
  send_text(visit.left, visit.a, "now");
  const std::size_t before = visit.moved;
  std::vector<Event> events;
  while (events.empty() && visit.moved < before + 1'000'000) {
    visit.move();
    events = Visit::events(visit.right);
  }
  CHECK(events.size() == 1 && words(events[0]) == "now");
  CHECK(visit.moved - before < 64 * 1024 + 20'000);  // the rest of the frame that had begun, and a piece
  const std::size_t until_here = visit.moved;
  visit.left.fill(visit.a, false);
  visit.run();
  CHECK(visit.moved - until_here < 64 * 1024 + 10);  // at most the rest of one frame
  iovec piece;
  CHECK(visit.left.gather(visit.a, &piece, 1) == 0);
  send_text(visit.left, visit.a, "still in step");
  visit.run();
  events = Visit::events(visit.right);
  CHECK(events.size() == 1 && words(events[0]) == "still in step");
}

TEST(samples_give_a_rate) {
  Core core;
  const ConnId conn = core.open("peer", false);
  core.make_bulk(1, conn);
  core.sample(1, conn, 10 * millisecond);
  core.tick(500 * millisecond);
  CHECK(!core.has_events());  // no filler yet
  const Ns began = 1'000 * millisecond;
  for (int i = 0; i <= 35; ++i) {
    Bytes filler = frame(1'001, 5, 1'000);
    feed(core, conn, filler, began + i * millisecond);
  }
  core.tick(began + 41 * millisecond);
  const auto events = Visit::events(core);
  CHECK(events.size() == 4);
  for (std::size_t i = 0; i < events.size(); ++i) {
    const Ns elapsed = i < 3 ? Ns(10 * (i + 1)) : 41;
    CHECK(events[i].kind == Event::Kind::sample && events[i].conn == conn);
    CHECK(events[i].elapsed == elapsed * millisecond);
    CHECK(events[i].counted == std::min<Ns>(elapsed, 35) * millisecond);
    CHECK(events[i].bytes == std::min<std::uint64_t>(elapsed, 35) * 1'000);
  }
  core.sample(1, conn, 0);
  core.tick(began + 500 * millisecond);
  CHECK(!core.has_events());
}

// What one read brings, of filler frames that follow each other without end: all there is room for, or less.
void read_filler(Core& core, ConnId conn, Ns now, std::size_t most) {
  const auto space = core.receive_space(conn);
  const std::size_t bytes = std::min(most, space.size());
  static std::size_t at = 0;
  static const Bytes stream = frame(60'001, 5, 60'000);
  for (std::size_t i = 0; i < bytes; ++i) space[i] = stream[at++ % stream.size()];
  core.received(now, conn, bytes);
}

TEST(a_reader_that_is_behind_waits_with_its_sample_until_it_has_caught_up) {
  Core core;
  const ConnId conn = core.open("peer", false);
  core.make_bulk(1, conn);
  core.sample(1, conn, 20 * millisecond);
  const Ns began = 1'000 * millisecond;
  read_filler(core, conn, began, 1'000);
  read_filler(core, conn, began + 5 * millisecond, 50'000);
  // The process sleeps; then it reads as much as fits, and there is more.
  const Ns woke = began + 300 * millisecond;
  read_filler(core, conn, woke, std::size_t{1} << 30);
  auto events = Visit::events(core);
  CHECK(events.size() == 1 && events[0].elapsed == 300 * millisecond && events[0].counted == 5 * millisecond);
  const std::uint64_t first = events[0].bytes;
  CHECK(first > 49'000 && first <= 50'000);
  read_filler(core, conn, woke + 21 * millisecond, std::size_t{1} << 30);
  CHECK(!core.has_events());
  read_filler(core, conn, woke + 22 * millisecond, 10'000);
  events = Visit::events(core);
  CHECK(events.size() == 1 && events[0].counted == 322 * millisecond && events[0].bytes > first + 500'000);
  // A writer that never catches up limits the rate of the link.
  for (Ns i = 0; i < 60; ++i) read_filler(core, conn, woke + (30 + i) * millisecond, std::size_t{1} << 30);
  events = Visit::events(core);
  CHECK(events.size() == 2 && events[0].elapsed == 347 * millisecond);
  for (const Event& event : events) CHECK(event.counted == event.elapsed);
}

TEST(a_peer_that_requests_and_does_not_read_is_dropped) {
  Visit visit;
  Bytes block(8 << 20);
  const MemoryOwner out = keep();
  for (int i = 0; i < 9; ++i) visit.left.send_blocks(1, visit.a, {{block.data(), block.size(), std::nullopt}}, out);
  const auto event = visit.left.next_event();
  CHECK(event && event->kind == Event::Kind::closed && event->text.starts_with("it asks for blocks and does not read"));
  CHECK(out.use_count() == 1);
}

TEST(a_peer_that_reads_may_go_on_requesting) {
  Visit visit(1, 1 << 22);
  Bytes block(8 << 20), got(8 << 20);
  for (int i = 0; i < 10; ++i) {
    visit.right.expect_blocks(visit.b, 1, {{got.data(), got.size(), std::nullopt}}, keep());
    visit.left.send_blocks(1, visit.a, {{block.data(), block.size(), std::nullopt}}, keep());
    visit.run();
  }
  CHECK(Visit::events(visit.left).empty() && Visit::events(visit.right).size() == 10);
}

bool refuses(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

TEST(invalid_commands_are_refused) {
  Core core;
  const ConnId conn = core.open("peer", false);
  Bytes memory(10);
  CHECK(refuses([&] { core.expect_blocks(conn, 1, {whole(memory)}, keep()); }));  // not bulk yet
  CHECK(refuses([&] { core.fill(conn, true); }));
  core.make_bulk(1, conn);
  CHECK(refuses([&] { core.make_bulk(1, conn); }));
  CHECK(refuses([&] { core.expect_blocks(conn, 1, {}, keep()); }));
  CHECK(refuses([&] { core.expect_blocks(conn, 1, {{memory.data(), 0, std::nullopt}}, keep()); }));
  CHECK(refuses([&] { core.send_blocks(1, conn, {{memory.data(), max_bulk_bytes, std::nullopt}}, keep()); }));
  CHECK(refuses([&] { core.sample(1, conn, -1); }));
}

// What was read together with the handshake's last message is bulk already.
TEST(frames_behind_the_handshake_are_not_lost) {
  Core core;
  const ConnId conn = core.open("peer", true);
  Bytes bytes = frame(6, 0, 5);
  const Bytes second = frame(4, 0, 3), filler = frame(101, 5, 100);
  bytes.insert(bytes.end(), filler.begin(), filler.end());
  bytes.insert(bytes.end(), second.begin(), second.end());
  feed(core, conn, bytes);
  CHECK(Visit::events(core).size() == 2);  // accepted, and one message
  core.make_bulk(1, conn);
  const auto events = Visit::events(core);
  CHECK(events.size() == 1 && events[0].body.size() == 3);
}

TEST(garbage_ends_a_bulk_connection_and_nothing_else) {
  std::mt19937 rng(11);
  for (int i = 0; i < 500; ++i) {
    Core core;
    const ConnId conn = core.open("peer", false);
    core.make_bulk(1, conn);
    Bytes memory(64);
    core.expect_blocks(conn, 1, {whole(memory)}, keep());
    Bytes bytes(4'096);
    for (std::byte& each : bytes) each = static_cast<std::byte>(rng());
    if (i % 2 == 0) bytes[2] = bytes[3] = std::byte{0};  // a length that is not absurd
    feed(core, conn, bytes);
  }
}

}  // namespace
