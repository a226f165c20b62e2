// The table of hints: any content of the file, as readers, the engine's lanes and the next agent meet it.
//
// Checked: a reader takes no advice from a table that is not fresh, nor for another owner; shares and paths are within
// their limits; lanes complete an op under any advice; the next writer takes the file over, or throws with a reason,
// and the table that it lays out is consistent.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "fuzz.hpp"
#include "ringfold/hints.hpp"
#include "ringfold/path_hints.hpp"

using namespace ringfold;
using fuzz::Input;

namespace {

constexpr std::uint32_t slots = 4;  // that the input fills
constexpr std::uint64_t second = 1'000'000'000;

// One file for the life of the program: making a name costs more than everything else here.
struct File {
  std::string path;
  int fd;
  File() {
    const bool has_memory = std::filesystem::is_directory("/dev/shm");
    path = std::string(has_memory ? "/dev/shm" : "/tmp") + "/ringfold-fuzz-" + std::string(6, 'X');
    fd = ::mkstemp(path.data());
    REQUIRE(fd >= 0, "no file for hints");
  }
  ~File() {
    ::close(fd);
    ::unlink(path.c_str());
  }
  void write(const void* at, std::size_t bytes, std::size_t offset) const {
    const ssize_t written = ::pwrite(fd, at, bytes, static_cast<off_t>(offset));
    REQUIRE(written == static_cast<ssize_t>(bytes), "the file takes no bytes");
  }
};

ringfold_hints_header header(Input& input, std::uint64_t now) {
  ringfold_hints_header out{};
  out.magic = input.number<std::uint64_t>({RINGFOLD_HINTS_MAGIC});
  out.abi = input.number<std::uint32_t>({RINGFOLD_HINTS_ABI});
  out.header_bytes = input.number<std::uint32_t>({RINGFOLD_HINTS_HEADER_BYTES});
  out.slot_bytes = input.number<std::uint32_t>({RINGFOLD_HINTS_SLOT_BYTES});
  out.slots = input.number<std::uint32_t>({RINGFOLD_HINTS_SLOTS});
  out.file_bytes = input.number<std::uint64_t>({RINGFOLD_HINTS_FILE_BYTES});
  out.generation = input.value<std::uint8_t>();
  out.heartbeat_ns = input.number<std::uint64_t>({now, now, 0});
  out.stale_after_ns = input.number<std::uint64_t>({second * 1'000});
  return out;
}

ringfold_hint_slot slot(Input& input) {
  ringfold_hint_slot out{};
  const std::uint64_t generation = input.number<std::uint64_t>({1, 1, 2}) & RINGFOLD_WORD_GENERATION_MASK;
  const std::uint64_t form = input.number<std::uint8_t>({2, 3, 4, 1}) & 7u;
  out.word = generation << RINGFOLD_WORD_GENERATION_AT | (input.chance(16) ? 0 : RINGFOLD_WORD_VALID) |
             form << RINGFOLD_WORD_FORM_AT | (input.value<std::uint64_t>() & ((std::uint64_t{1} << 40) - 1));
  if (input.chance(16)) out.word = input.value<std::uint64_t>();
  out.sequence = input.number<std::uint32_t>({2, 2, 3});
  out.wide[0] =
      generation << RINGFOLD_WORD_GENERATION_AT | std::uint64_t{input.byte()} << 16 | input.value<std::uint16_t>();
  for (int i = 1; i < 5; ++i) out.wide[i] = input.value<std::uint64_t>();
  out.written_ns = input.byte();
  return out;
}

// Two peers, four lanes on as many paths, and one op under the advice of the file: it ends.
void reduce_under(FollowedHints& advice, std::uint32_t paths) {
  Core cores[2];
  struct Lane {
    ConnId out, in;
    std::size_t from;
  };
  std::vector<Lane> lanes;
  Ns now = 1'000'000'000;
  for (std::size_t from = 0; from < 2; ++from) {
    for (std::uint32_t lane = 0; lane < paths; ++lane) {
      const ConnId out = cores[from].open("next", false), in = cores[1 - from].open("previous", true);
      const Sharing sharing{true, lane, paths, 0};
      cores[from].promote(now, out, true, 1 - from, lane, sharing);
      cores[1 - from].promote(now, in, false, from, lane, sharing);
      lanes.push_back({out, in, from});
    }
  }
  std::vector<std::int32_t> values[2];
  OpPtr ops[2];
  for (std::uint32_t i = 0; i < 2; ++i) {
    cores[i].set_path_hints(&advice);
    EpochSpec spec{1, i, 2, {0, 1}, false, 0, 64};
    spec.multipath = true;
    cores[i].install(now, spec);
    values[i].assign(200, static_cast<std::int32_t>(i + 1));
    OpSpec op;
    auto* at = reinterpret_cast<std::byte*>(values[i].data());
    op.timeout = 1'000'000'000'000;
    op.spans.push_back({at, at, values[i].size() * 4, kernels::DType::i32, 0});
    ops[i] = cores[i].find(cores[i].submit(now, op));
  }
  // Only lanes that the core has marked are looked at, as in the engine.
  for (int rounds = 0; rounds < 2'000; ++rounds) {
    bool moved = false;
    for (std::size_t i = 0; i < 2; ++i) {
      for (const ConnId conn : cores[i].take_dirty()) {
        moved = true;
        for (const Lane& lane : lanes) {
          const bool is_out = lane.from == i && lane.out == conn, is_in = lane.from != i && lane.in == conn;
          if (!is_out && !is_in) continue;
          for (Bytes sent = fuzz::take(cores[i], conn, now, 4096); !sent.empty();
               sent = fuzz::take(cores[i], conn, now, 4096)) {
            fuzz::feed(cores[1 - i], is_out ? lane.in : lane.out, sent, now);
          }
        }
      }
    }
    if (!moved) break;
  }
  for (const OpPtr& op : ops) {
    REQUIRE(op->state == OpState::finished && op->result.status == OpStatus::ok,
            "an op does not end under this advice");
  }
  for (const auto& each : values) REQUIRE(each == std::vector<std::int32_t>(200, 3), "a wrong result");
}

void check_reader(const hints::Reader& reader) {
  for (std::uint32_t number :
       {0u, 1u, slots - 1, std::uint32_t{RINGFOLD_HINTS_SLOTS} - 1, std::uint32_t{RINGFOLD_HINTS_SLOTS}, ~0u}) {
    for (std::uint32_t generation = 0; generation < 3; ++generation) {
      ringfold_hint hint{};
      const auto result = reader.read(number, generation, hint);
      const hints::Word word = reader.read(number, generation);
      if (reader.state() != hints::State::fresh || number >= RINGFOLD_HINTS_SLOTS) {
        REQUIRE(result == RINGFOLD_HINT_LOCAL && word == 0, "advice of a table that is not fresh");
      }
      REQUIRE(word == 0 || ringfold_word_generation(word) == generation, "advice for another owner");
      if (result != RINGFOLD_HINT_READ) continue;
      REQUIRE(hint.paths <= RINGFOLD_HINTS_MOST_PATHS, "%u paths", hint.paths);
      std::uint32_t sum = 0;
      for (std::uint32_t path = 0; path < 4; ++path) sum += ringfold_word_share(word, path);
      REQUIRE(sum == 0 || sum == RINGFOLD_SHARE_ALL, "shares sum to %u", sum);
      advice_of(hint);
    }
    reader.written_ns(number);
  }
  reader.table_generation();
}

void take_over(const std::string& path) {
  try {
    hints::Writer writer(path, second, 0600);
    hints::Reader reader(path);
    REQUIRE(reader.state() == hints::State::fresh, "a table that was taken over is %s", hints::name_of(reader.state()));
    for (std::uint32_t number = 0; number < slots; ++number) {
      const std::uint32_t generation = (writer.slot_generations()[number] + 1) & RINGFOLD_WORD_GENERATION_MASK;
      REQUIRE(reader.read(number, ringfold_word_generation(writer.word(number))) == 0, "advice of the agent before");
      if (generation == 0) continue;
      const std::uint16_t shares[5] = {65'531, 1, 1, 1, 1};
      writer.open(number, generation);
      writer.publish(number, shares, 0);
      ringfold_hint hint{};
      REQUIRE(reader.read(number, generation, hint) == RINGFOLD_HINT_READ && hint.paths == 5,
              "what was published is not read");
    }
  } catch (const std::runtime_error&) {  // it holds something else: an error, and the file is left alone
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const File file;
  Input input(data, size);
  const std::uint64_t now = ringfold_hints_now();
  const std::size_t whole = RINGFOLD_HINTS_FILE_BYTES;
  const std::size_t bytes = input.chance(16) ? input.below(whole + 4096) : whole;
  REQUIRE(::ftruncate(file.fd, 0) == 0 && ::ftruncate(file.fd, static_cast<off_t>(bytes)) == 0, "the file has no size");
  const bool has_header = !input.chance(16);
  if (has_header && bytes >= sizeof(ringfold_hints_header)) {
    const ringfold_hints_header head = header(input, now);
    file.write(&head, sizeof head, 0);
  }
  for (std::uint32_t number = 0; number < slots && bytes == whole; ++number) {
    const ringfold_hint_slot each = slot(input);
    file.write(&each, sizeof each, RINGFOLD_HINTS_HEADER_BYTES + number * sizeof each);
  }
  const std::uint32_t paths = 2 + static_cast<std::uint32_t>(input.below(7));
  {
    hints::Reader reader(file.path);
    reader.look(now);
    check_reader(reader);
    FollowedHints advice;
    for (PeerId peer = 0; peer < 2; ++peer)
      advice.follow(peer, file.path, static_cast<std::uint32_t>(input.below(slots)), 1);
    advice.look(static_cast<Ns>(now));
    if (reader.state() == hints::State::fresh) reduce_under(advice, paths);
    if (input.chance(8)) {  // the mapped file is truncated
      REQUIRE(::ftruncate(file.fd, static_cast<off_t>(input.below(whole))) == 0, "the file has no size");
      check_reader(reader);
      reader.look(now + second);
      check_reader(reader);
    }
  }
  if (input.chance(64)) take_over(file.path);
  return 0;
}
