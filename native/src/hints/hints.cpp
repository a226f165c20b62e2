#include "ringfold/hints.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "ringfold/error_text.hpp"
#include "ringfold/mapping_guard.hpp"

namespace ringfold::hints {
namespace {

constexpr std::uint64_t try_again_ns = 100'000'000;

template <typename T>
void store(T& target, T value, int order = __ATOMIC_RELEASE) {
  __atomic_store_n(&target, value, order);
}

template <typename T>
T load(const T& source) {
  return __atomic_load_n(&source, __ATOMIC_ACQUIRE);
}

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error("cannot write hints into " + path + ": " + what);
}

Word generation_bits(std::uint32_t generation) { return Word{generation} << RINGFOLD_WORD_GENERATION_AT; }

bool is_zero(const void* bytes, std::size_t count) {
  const auto* each = static_cast<const char*>(bytes);
  return std::all_of(each, each + count, [](char byte) { return byte == 0; });
}

}  // namespace

InUse::InUse(const std::string& path, std::uint64_t pid)
    : std::runtime_error("another agent writes " + path + (pid != 0 ? ": process " + std::to_string(pid) : "")),
      pid(pid) {}

Word make_word(std::uint32_t generation, std::span<const std::uint16_t> shares, std::uint32_t backpressure) {
  const std::size_t paths = shares.size();
  if (paths < 2 || paths > 4) throw std::invalid_argument("a word holds two to four paths");
  Word word = generation_bits(generation) | RINGFOLD_WORD_VALID | Word{paths} << RINGFOLD_WORD_FORM_AT |
              Word{backpressure & 15u} << RINGFOLD_WORD_BACKPRESSURE_AT;
  if (paths == 2) return word | shares[1];
  // Rounding must neither give the others more than there is, nor leave path 0 a crumb when it is to get nothing.
  std::uint32_t rest = RINGFOLD_WORD_NARROW_ALL, largest = 1;
  std::uint32_t narrow[4] = {};
  for (std::uint32_t path = 1; path < paths; ++path) {
    const std::uint32_t wanted =
        (shares[path] * RINGFOLD_WORD_NARROW_ALL + RINGFOLD_SHARE_ALL / 2) / RINGFOLD_SHARE_ALL;
    narrow[path] = std::min(wanted, rest);
    rest -= narrow[path];
    if (narrow[path] > narrow[largest]) largest = path;
  }
  if (shares[0] == 0) narrow[largest] += rest;
  for (std::uint32_t path = 1; path < paths; ++path) {
    word |= Word{narrow[path]} << ((path - 1) * RINGFOLD_WORD_NARROW_BITS);
  }
  return word;
}

Writer::Writer(const std::string& path, std::uint64_t stale_after_ns, unsigned mode) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, mode);
  if (fd_ < 0) fail(path, errno == ELOOP ? std::string("it is a symbolic link") : error_text(errno));
  try {
    struct stat about{};
    if (::fstat(fd_, &about) != 0) fail(path, error_text(errno));
    if (!S_ISREG(about.st_mode)) fail(path, "it is not a regular file");
    if (about.st_uid != ::geteuid()) fail(path, "it belongs to user " + std::to_string(about.st_uid));
    if (about.st_nlink != 1) fail(path, "it has another name too");
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      ringfold_hints_header there{};
      const bool known = ::pread(fd_, &there, sizeof there, 0) == static_cast<ssize_t>(sizeof there);
      throw InUse(path, known ? there.writer_pid : 0);
    }
    if (::fchmod(fd_, mode) != 0) fail(path, error_text(errno));
    if (about.st_size < static_cast<off_t>(RINGFOLD_HINTS_FILE_BYTES)) {
      // Room for all of it now: a store into a hole of a full disk would be a SIGBUS.
      const int why = ::posix_fallocate(fd_, 0, RINGFOLD_HINTS_FILE_BYTES);
      if (why != 0) fail(path, error_text(why));
    }
    void* const base = ::mmap(nullptr, RINGFOLD_HINTS_FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (base == MAP_FAILED) fail(path, error_text(errno));
    base_ = base;
    guard_mapping(base_, RINGFOLD_HINTS_FILE_BYTES);
    const ringfold_hints_header& found = *header();
    const bool is_ours = found.magic == RINGFOLD_HINTS_MAGIC;
    if (!is_ours && !is_zero(base_, RINGFOLD_HINTS_HEADER_BYTES)) fail(path, "it holds something else");
    const bool is_same = is_ours && found.abi == RINGFOLD_HINTS_ABI && found.slots == RINGFOLD_HINTS_SLOTS &&
                         found.slot_bytes == RINGFOLD_HINTS_SLOT_BYTES &&
                         found.header_bytes == RINGFOLD_HINTS_HEADER_BYTES;
    is_same ? take_over() : lay_out();
    store(header()->stale_after_ns, stale_after_ns);
    store(header()->writer_pid, static_cast<std::uint64_t>(::getpid()));
    beat();
  } catch (...) {
    if (base_ != nullptr) {
      unguard_mapping(base_);
      ::munmap(base_, RINGFOLD_HINTS_FILE_BYTES);
    }
    ::close(fd_);
    throw;
  }
}

Writer::~Writer() { close(); }

void Writer::close() {
  if (base_ == nullptr) return;
  store(header()->heartbeat_ns, std::uint64_t{0});
  store(header()->writer_pid, std::uint64_t{0});
  unguard_mapping(base_);
  ::munmap(base_, RINGFOLD_HINTS_FILE_BYTES);
  base_ = nullptr;
  ::close(fd_);  // and with it goes the lock
}

// Another version's readers look at the first 16 bytes before anything else: those say "not yours" until all is laid
// out.
void Writer::lay_out() {
  ringfold_hints_header& head = *header();
  store(head.abi, 0u);
  store(head.magic, RINGFOLD_HINTS_MAGIC);
  store(head.heartbeat_ns, std::uint64_t{0});
  auto* words = static_cast<std::uint64_t*>(base_);
  for (std::size_t at = 2; at < RINGFOLD_HINTS_FILE_BYTES / sizeof *words; ++at) {
    store(words[at], std::uint64_t{0}, __ATOMIC_RELAXED);
  }
  head.header_bytes = RINGFOLD_HINTS_HEADER_BYTES;
  head.slot_bytes = RINGFOLD_HINTS_SLOT_BYTES;
  head.slots = RINGFOLD_HINTS_SLOTS;
  head.file_bytes = RINGFOLD_HINTS_FILE_BYTES;
  store(head.generation, std::uint64_t{1});
  // Not from 1: an owner from the life of an earlier file should not find his number here by chance.
  const auto seed = static_cast<std::uint32_t>(ringfold_hints_now() >> 10) & RINGFOLD_WORD_GENERATION_MASK;
  for (std::uint32_t each = 0; each < RINGFOLD_HINTS_SLOTS; ++each) store(slot(each).word, generation_bits(seed));
  store(head.abi, RINGFOLD_HINTS_ABI);
}

void Writer::take_over() {
  store(header()->heartbeat_ns, std::uint64_t{0});
  for (std::uint32_t each = 0; each < RINGFOLD_HINTS_SLOTS; ++each) {
    ringfold_hint_slot& found = slot(each);
    store(found.word, generation_bits(ringfold_word_generation(found.word)));
    // A reader may be waiting for a half-written area to become whole. It never will: it is nobody's before it is even.
    store(found.wide[0], std::uint64_t{0}, __ATOMIC_RELAXED);
    store(found.flags, 0u, __ATOMIC_RELAXED);
    if (found.sequence & 1u) store(found.sequence, found.sequence + 1);
  }
  store(header()->generation, header()->generation + 1);
}

ringfold_hint_slot& Writer::slot(std::uint32_t number) const {
  if (base_ == nullptr) throw std::logic_error("the hints are closed");
  if (number >= RINGFOLD_HINTS_SLOTS) throw std::out_of_range("there is no slot " + std::to_string(number));
  char* const slots = static_cast<char*>(base_) + RINGFOLD_HINTS_HEADER_BYTES;
  return reinterpret_cast<ringfold_hint_slot*>(slots)[number];
}

std::uint64_t Writer::generation() const {
  if (base_ == nullptr) throw std::logic_error("the hints are closed");
  return header()->generation;
}

std::vector<std::uint32_t> Writer::slot_generations() const {
  std::vector<std::uint32_t> all(RINGFOLD_HINTS_SLOTS);
  for (std::uint32_t each = 0; each < RINGFOLD_HINTS_SLOTS; ++each) all[each] = ringfold_word_generation(word(each));
  return all;
}

void Writer::store_word(ringfold_hint_slot& target, Word word) {
  store(target.word, word);
  store(target.written_ns, ringfold_hints_now());
}

void Writer::open(std::uint32_t number, std::uint32_t generation) {
  if (generation == 0 || generation > RINGFOLD_WORD_GENERATION_MASK) throw std::invalid_argument("bad generation");
  store_word(slot(number), generation_bits(generation));
}

void Writer::withdraw(std::uint32_t number) {
  ringfold_hint_slot& target = slot(number);
  store_word(target, generation_bits(ringfold_word_generation(target.word)));
}

void Writer::publish(std::uint32_t number, std::span<const std::uint16_t> shares, std::uint32_t backpressure,
                     std::uint32_t flags) {
  ringfold_hint_slot& target = slot(number);
  std::uint32_t sum = 0;
  for (const std::uint16_t share : shares) sum += share;
  if (shares.size() < 2 || shares.size() > RINGFOLD_HINTS_MOST_PATHS || sum != RINGFOLD_SHARE_ALL ||
      backpressure >> shares.size() != 0) {
    throw std::invalid_argument("a hint has 2 to 16 paths, and shares that sum to 65535");
  }
  const std::uint32_t generation = ringfold_word_generation(target.word);
  if ((flags & ~RINGFOLD_HINT_FIXED) != 0) throw std::invalid_argument("unknown flags of a hint");
  store(target.flags, flags);
  if (shares.size() <= 4) {
    store_word(target, make_word(generation, shares, backpressure));
    return;
  }
  std::uint64_t wide[5] = {generation_bits(generation) | std::uint64_t{shares.size()} << 16 | backpressure};
  std::memcpy(&wide[1], shares.data(), shares.size_bytes());
  const std::uint32_t before = target.sequence & ~1u;
  store(target.sequence, before + 1, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (int at = 0; at < 5; ++at) {
    store(target.wide[at], wide[at], __ATOMIC_RELAXED);
    for (unsigned spin = 0; spin < spins_; ++spin) asm volatile("" : : : "memory");
  }
  store(target.sequence, before + 2);
  store_word(target, generation_bits(generation) | RINGFOLD_WORD_VALID |
                         Word{RINGFOLD_WORD_FORM_WIDE} << RINGFOLD_WORD_FORM_AT);
}

void Writer::tear(std::uint32_t number) {
  ringfold_hint_slot& target = slot(number);
  store(target.sequence, target.sequence | 1u, __ATOMIC_RELAXED);
  store(target.wide[2], ~target.wide[2], __ATOMIC_RELAXED);
}

Word Writer::word(std::uint32_t number) const { return load(slot(number).word); }

void Writer::beat() {
  if (base_ == nullptr) throw std::logic_error("the hints are closed");
  store(header()->heartbeat_ns, ringfold_hints_now());
}

const char* name_of(State state) {
  switch (state) {
    case State::fresh:
      return "fresh";
    case State::missing:
      return "missing";
    case State::foreign:
      return "foreign";
    case State::other_abi:
      return "other version";
    case State::stale:
      return "stale";
  }
  return "";
}

static_assert(static_cast<int>(State::stale) == RINGFOLD_HINTS_STALE);

Reader::Reader(std::string path) : path_(std::move(path)) { look(ringfold_hints_now()); }

Reader::~Reader() { unmap(); }

void Reader::unmap() {
  if (map_.base != nullptr) unguard_mapping(map_.base);
  ringfold_hints_close(&map_);
}

State Reader::look(std::uint64_t now_ns) {
  state_ = static_cast<State>(ringfold_hints_look(&map_, now_ns));
  if (state_ == State::fresh || now_ns < next_try_ns_) return state_;
  next_try_ns_ = now_ns + try_again_ns;
  // What was mapped as hints and is none any more has been truncated: the same file may be whole again.
  if (state_ != State::foreign && ringfold_hints_is_current(path_.c_str(), &map_)) return state_;
  unmap();
  state_ = static_cast<State>(ringfold_hints_map_file(path_.c_str(), &map_));
  if (map_.base == nullptr) return state_;
  guard_mapping(map_.base, RINGFOLD_HINTS_FILE_BYTES);  // before the first read: the file may have shrunk since
  state_ = static_cast<State>(ringfold_hints_look(&map_, ringfold_hints_now()));
  if (state_ == State::foreign) unmap();
  return state_;
}

std::uint64_t Reader::written_ns(std::uint32_t slot) const {
  if (map_.base == nullptr || slot >= RINGFOLD_HINTS_SLOTS) return 0;
  return load(ringfold_hint_slot_at(map_.base, slot)->written_ns);
}

std::uint64_t Reader::table_generation() const {
  return map_.base == nullptr ? 0 : load(static_cast<const ringfold_hints_header*>(map_.base)->generation);
}

}  // namespace ringfold::hints
