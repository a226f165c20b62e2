// Hints: words, the life of the file, crashes in the middle of a write, and a reader beside a writer.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "check.hpp"
#include "hints_hammer.hpp"
#include "ringfold/hints.hpp"

using namespace ringfold::hints;
using Shares = std::vector<std::uint16_t>;

namespace {

constexpr std::uint64_t second = 1'000'000'000;

struct Folder {
  std::filesystem::path path;
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ringfold-hints-").string() + std::string(6, 'X');
    path = ::mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file() const { return (path / "hints").string(); }
};

ino_t inode(const std::string& path) {
  struct stat about{};
  ::stat(path.c_str(), &about);
  return about.st_ino;
}

template <typename Error>
bool throws(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error&) {
    return true;
  }
  return false;
}

State look(Reader& reader) { return reader.look(ringfold_hints_now() + second); }  // past the pause between tries

TEST(hint_words_keep_their_shares) {
  for (const Shares& shares : {Shares{65535, 0}, Shares{0, 65535}, Shares{32767, 32768}, Shares{1, 65534}}) {
    const Word word = make_word(5, shares, 2);
    CHECK(ringfold_word_share(word, 0) == shares[0] && ringfold_word_share(word, 1) == shares[1]);
    CHECK(ringfold_word_is_for(word, 5) && ringfold_word_backpressure(word) == 2);
  }
  for (std::uint32_t first = 0; first <= 65535; first += 151) {
    const auto second_share = static_cast<std::uint16_t>((65535 - first) / 3);
    const Shares shares{static_cast<std::uint16_t>(first), second_share, second_share,
                        static_cast<std::uint16_t>(65535 - first - 2u * second_share)};
    const Word word = make_word(1, shares, 0);
    std::uint32_t sum = 0;
    for (std::uint32_t path = 0; path < 4; ++path) {
      const int off = static_cast<int>(ringfold_word_share(word, path)) - shares[path];
      CHECK_MESSAGE(std::abs(off) <= 32, "path %u of first %u is off by %d", path, first, off);
      sum += ringfold_word_share(word, path);
    }
    CHECK(sum == 65535);
  }
  CHECK(ringfold_word_share(make_word(1, Shares{0, 21845, 21845, 21845}, 0), 0) == 0);
  CHECK(ringfold_word_share(make_word(1, Shares{0, 32768, 32767}, 0), 0) == 0);
}

TEST(what_is_published_is_read) {
  Folder folder;
  Writer writer(folder.file(), second, 0644);
  Reader reader(folder.file());
  CHECK(reader.state() == State::fresh);
  writer.open(3, 42);
  CHECK(reader.read(3, 42) == 0);  // no advice yet
  writer.publish(3, Shares{21845, 43690}, 1);
  CHECK(ringfold_word_share(reader.read(3, 42), 1) == 43690);
  CHECK(reader.read(3, 41) == 0 && reader.read(2, 42) == 0 && reader.read(4096, 42) == 0);
  const Shares many{5, 10, 15, 20, 65485};
  writer.publish(3, many, 16);
  ringfold_hint hint{};
  CHECK(reader.read(3, 42, hint) == RINGFOLD_HINT_READ && hint.paths == 5 && hint.backpressure == 16);
  CHECK(std::equal(many.begin(), many.end(), hint.shares));
  writer.withdraw(3);
  CHECK(reader.read(3, 42, hint) == RINGFOLD_HINT_LOCAL);
  CHECK(writer.slot_generations()[3] == 42);
  CHECK(throws<std::invalid_argument>([&] { writer.publish(3, Shares{1, 2}, 0); }));
  CHECK(throws<std::invalid_argument>([&] { writer.publish(3, Shares{65535}, 0); }));
  CHECK(throws<std::invalid_argument>([&] { writer.publish(3, Shares{65535, 0}, 4); }));
  CHECK(throws<std::invalid_argument>([&] { writer.publish(3, Shares{65535, 0}, 0, 2); }));
  writer.publish(3, Shares{65535, 0}, 0, RINGFOLD_HINT_FIXED);
  CHECK(reader.flags(3) == RINGFOLD_HINT_FIXED && reader.flags(RINGFOLD_HINTS_SLOTS) == 0);
  writer.publish(3, Shares{65535, 0}, 0);
  CHECK(reader.flags(3) == 0);
  CHECK(throws<std::invalid_argument>([&] { writer.open(3, 0); }));
  CHECK(throws<std::out_of_range>([&] { writer.open(4096, 1); }));
}

TEST(the_agent_goes_and_comes_back) {
  Folder folder;
  Reader early(folder.file());
  CHECK(early.state() == State::missing);
  auto writer = std::make_unique<Writer>(folder.file(), second, 0644);
  CHECK(look(early) == State::fresh);
  CHECK(early.look(ringfold_hints_now() + 3 * second) == State::stale);  // the heartbeat is old by that clock
  CHECK(early.look(ringfold_hints_now()) == State::fresh);
  writer->open(7, 9);
  writer->publish(7, Shares{0, 65535}, 0);
  CHECK(early.read(7, 9) != 0);
  CHECK(throws<InUse>([&] { Writer second_writer(folder.file(), second, 0644); }));
  const ino_t before = inode(folder.file());
  const std::uint64_t generation = writer->generation();
  writer.reset();
  CHECK(early.look(ringfold_hints_now()) == State::stale && early.read(7, 9) == 0);
  writer = std::make_unique<Writer>(folder.file(), second, 0644);
  CHECK(inode(folder.file()) == before && writer->generation() == generation + 1);
  CHECK(early.look(ringfold_hints_now()) == State::fresh);
  CHECK(early.read(7, 9) == 0);  // the old owner's advice is gone, his number is not
  CHECK(writer->slot_generations()[7] == 9);
  CHECK(early.table_generation() == generation + 1);
}

TEST(a_torn_slot_has_no_owner) {
  Folder folder;
  Reader reader(folder.file());
  ringfold_hint hint{};
  {
    Writer writer(folder.file(), second, 0644);
    look(reader);
    writer.open(1, 5);
    writer.publish(1, Shares{1, 2, 3, 4, 65525}, 0);
    CHECK(reader.read(1, 5, hint) == RINGFOLD_HINT_READ);
    writer.tear(1);
    hint.shares[0] = 77;
    CHECK(reader.read(1, 5, hint) == RINGFOLD_HINT_BUSY && hint.shares[0] == 77);  // it keeps what it had
  }
  Writer writer(folder.file(), second, 0644);
  reader.look(ringfold_hints_now());
  CHECK(reader.state() == State::fresh && reader.read(1, 5, hint) == RINGFOLD_HINT_LOCAL);
  writer.open(1, 5);
  writer.publish(1, Shares{1, 2, 3, 4, 65525}, 0);
  CHECK(reader.read(1, 5, hint) == RINGFOLD_HINT_READ && hint.shares[1] == 2);
}

TEST(other_versions_and_foreign_files) {
  Folder folder;
  {
    Writer writer(folder.file(), second, 0644);
  }
  const auto poke = [&](std::size_t at, std::uint32_t value) {
    std::fstream file(folder.file(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file.write(reinterpret_cast<const char*>(&value), sizeof value);
  };
  Reader reader(folder.file());
  poke(offsetof(ringfold_hints_header, abi), 99);
  CHECK(look(reader) == State::other_abi);
  const ino_t before = inode(folder.file());
  {
    Writer writer(folder.file(), second, 0644);  // of a newer agent: it lays the file out again
    CHECK(inode(folder.file()) == before);
    CHECK(reader.look(ringfold_hints_now()) == State::fresh);
  }
  poke(0, 0x12345678);
  CHECK(look(reader) == State::foreign);
  CHECK(throws<std::runtime_error>([&] { Writer writer(folder.file(), second, 0644); }));
  std::filesystem::resize_file(folder.file(), 100);
  Reader shorter(folder.file());
  CHECK(shorter.state() == State::foreign);
}

TEST(a_file_that_was_replaced_is_found) {
  Folder folder;
  Reader reader(folder.file());
  {
    Writer writer(folder.file(), second, 0644);
  }
  look(reader);
  std::filesystem::remove(folder.file());
  Writer writer(folder.file(), 10 * second, 0644);
  CHECK(reader.look(ringfold_hints_now() + 3 * second) == State::fresh);
}

// Its pages are gone, also under a reader that is between its look and its read.
TEST(a_truncated_file_is_local_until_it_is_whole) {
  Folder folder;
  Writer writer(folder.file(), 10 * second, 0644);
  writer.open(4'000, 7);
  writer.publish(4'000, Shares{65'535, 0}, 0);
  Reader reader(folder.file()), other(folder.file());
  CHECK(reader.read(4'000, 7) != 0);
  std::filesystem::resize_file(folder.file(), 100);
  CHECK(reader.read(4'000, 7) == 0);
  CHECK(look(reader) == State::foreign);
  ringfold_hint hint{};
  CHECK(other.read(4'000, 7, hint) == RINGFOLD_HINT_LOCAL);
  CHECK(other.written_ns(4'000) == 0);
  writer.publish(4'000, Shares{0, 65'535}, 0);  // into nowhere
  writer.close();
  Writer next(folder.file(), 10 * second, 0644);
  next.open(4'000, 8);
  next.publish(4'000, Shares{0, 65'535}, 0);
  CHECK(reader.look(ringfold_hints_now() + 3 * second) == State::fresh);
  CHECK(reader.read(4'000, 8) != 0);
}

// The size that a reader has seen is not the size that it maps.
TEST(a_file_that_shrinks_while_it_is_opened_is_local) {
  Folder folder;
  {
    Writer writer(folder.file(), 10 * second, 0644);
  }
  std::atomic<bool> enough{false};
  std::thread shrinks([&] {
    while (!enough.load()) {
      std::filesystem::resize_file(folder.file(), 0);
      std::filesystem::resize_file(folder.file(), RINGFOLD_HINTS_FILE_BYTES);
    }
  });
  for (int i = 0; i < 10'000; ++i) {
    const Reader reader(folder.file());
    CHECK(reader.state() != State::fresh && reader.read(0, 1) == 0);
  }
  enough.store(true);
  shrinks.join();
}

TEST(links_and_directories_are_refused) {
  Folder folder;
  std::ofstream(folder.path / "mine") << "precious";
  std::filesystem::create_symlink(folder.path / "mine", folder.file());
  CHECK(throws<std::runtime_error>([&] { Writer writer(folder.file(), second, 0644); }));
  CHECK(std::filesystem::file_size(folder.path / "mine") == 8);
  CHECK(throws<std::runtime_error>([&] { Writer writer(folder.path.string(), second, 0644); }));
  Reader reader(folder.path.string());
  CHECK(reader.state() == State::foreign);
}

// A writer that is killed again and again, and a reader that never sees half of anything.
TEST(nothing_is_torn_by_kills) {
  Folder folder;
  constexpr std::uint32_t slots = 4;
  const std::vector<std::uint32_t> generations(slots, 11);
  {
    Writer writer(folder.file(), 10 * second, 0644);
  }
  Reader reader(folder.file());
  Hammered all;
  for (int life = 0; life < 12; ++life) {
    const std::uint64_t before = reader.table_generation();
    const pid_t child = ::fork();
    if (child == 0) {
      Writer writer(folder.file(), 10 * second, 0644);
      for (std::uint32_t slot = 0; slot < slots; ++slot) writer.open(slot, 11);
      hammer_writes(writer, slots, 0);
    }
    // Until it is at work, which the table's generation says, and then some more.
    for (int turn = 0, seen = 0; turn < 1'000'000 && seen < 200; ++turn) {
      const Hammered now = hammer_reads(reader, slots, generations, 1'000);
      all.hints += now.hints, all.torn += now.torn, all.busy += now.busy;
      seen += now.hints > 0 && reader.table_generation() > before;
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  CHECK(all.hints > 10'000);
  CHECK_MESSAGE(all.torn == 0, "%llu torn of %llu", static_cast<unsigned long long>(all.torn),
                static_cast<unsigned long long>(all.hints));
}

}  // namespace
