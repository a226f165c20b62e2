// Every kernel on every CPU level, against references that share nothing with the kernels: one element at a time, in
// wide integers, f16 and bf16 by searching the neighbours of a value instead of shifting bits, CRC bit by bit.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.hpp"
#include "ringfold/crc32c.hpp"
#include "ringfold/kernels.hpp"

using namespace ringfold;
using kernels::DType;
using kernels::ReduceOp;
using Bytes = std::vector<uint8_t>;

namespace {

const char* const dtype_names[] = {"u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f16", "bf16", "f32", "f64"};
const char* const op_names[] = {"sum", "avg", "prod", "min", "max"};
const size_t counts[] = {0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 100, 127, 255, 1000, 1023, 4099};

// The levels that this CPU has, the best one last.
std::vector<std::string> available_levels() {
  std::vector<std::string> levels;
  for (const char* level : {"generic", "avx2", "avx512"}) {
    if (kernels::set_cpu_level(level)) levels.emplace_back(level);
  }
  return levels;
}

// First: the other tests change the level.
TEST(the_best_level_is_detected) {
  const std::string detected = kernels::cpu_level();
  CHECK(available_levels().back() == detected);
}

template <class Test>
void on_every_level(Test test) {
  for (const std::string& level : available_levels()) {
    CHECK(kernels::set_cpu_level(level.c_str()));
    CHECK(kernels::cpu_level() == level);
    test(level.c_str());
  }
}

// xorshift64*: the same numbers on every machine.
struct Random {
  uint64_t state = 0x9e3779b97f4a7c15;
  uint64_t next() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 0x2545f4914f6cdd1d;
  }
};

template <class T>
T read(const uint8_t* p, size_t i) {
  T value;
  std::memcpy(&value, p + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void write(uint8_t* p, size_t i, T value) {
  std::memcpy(p + i * sizeof(T), &value, sizeof(T));
}

// ---- The 16-bit floats by their definition: sign, exponent_bits and fraction_bits from the top.

struct Format {
  int exponent_bits, fraction_bits;
};
constexpr Format f16{5, 10}, bf16{8, 7};

float decode(Format f, uint16_t bits) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int exponent = bits >> f.fraction_bits & ((1 << f.exponent_bits) - 1);
  const int fraction = bits & ((1 << f.fraction_bits) - 1);
  double value;
  if (exponent == (1 << f.exponent_bits) - 1) value = fraction != 0 ? std::nan("") : INFINITY;
  else if (exponent == 0) value = std::ldexp(fraction, 1 - bias - f.fraction_bits);
  else value = std::ldexp(fraction + (1 << f.fraction_bits), exponent - bias - f.fraction_bits);
  return static_cast<float>(bits & 0x8000 ? -value : value);  // exact
}

// Round to nearest even: bisect the positive numbers of the format, then take the nearer neighbour.
uint16_t encode(Format f, float value) {
  const auto infinity = static_cast<uint16_t>(((1 << f.exponent_bits) - 1) << f.fraction_bits);
  if (std::isnan(value)) return static_cast<uint16_t>(infinity | 1 << (f.fraction_bits - 1));
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  uint16_t low = 0, high = infinity;  // decode(low) <= size
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (decode(f, middle) <= size ? low : high) = middle;
  }
  // Infinity stands for the number that would come after the largest one.
  const double above =
      high == infinity ? 2.0 * decode(f, low) - decode(f, static_cast<uint16_t>(low - 1)) : decode(f, high);
  const double down = size - decode(f, low), up = above - size;
  const bool upwards = std::isinf(size) || up < down || (up == down && low % 2 == 1);
  return sign | (upwards ? high : low);
}

// ---- The reference of one element.

// All kernels write one NaN per type.
template <class T>
T one_nan(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

template <class T>
T float_reference(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return one_nan(a + b);
    case ReduceOp::prod:
      return one_nan(a * b);
    default:
      break;
  }
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  if (op == ReduceOp::min) return a < b ? a : b;
  return a > b ? a : b;
}

template <class T>
T integer_reference(ReduceOp op, T a, T b) {
  using Wide = __int128;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return static_cast<T>(static_cast<Wide>(a) + b);
    case ReduceOp::prod:
      return static_cast<T>(static_cast<unsigned __int128>(a) * static_cast<unsigned __int128>(b));
    case ReduceOp::min:
      return a < b ? a : b;
    case ReduceOp::max:
      return a > b ? a : b;
  }
  return 0;
}

struct Reference {
  ReduceOp op;
  uint32_t divisor;  // for quotient()

  template <class T>
  T combine(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) return float_reference(op, a, b);
    else return integer_reference(op, a, b);
  }

  template <class T>
  T quotient(T a) const {
    if constexpr (std::is_floating_point_v<T>) return one_nan(a / static_cast<T>(divisor));
    else return static_cast<T>(static_cast<__int128>(a) / divisor);
  }
};

// Applies `of` to every element in its dtype; f16 and bf16 are defined as the f32 result, rounded.
template <class Of>
void for_dtype(DType dtype, size_t count, uint8_t* t, const uint8_t* a, const uint8_t* b, Of of) {
  const auto plain = [&]<class T>(T) {
    for (size_t i = 0; i < count; ++i) write<T>(t, i, of(read<T>(a, i), read<T>(b, i)));
  };
  const auto half = [&](Format f) {
    for (size_t i = 0; i < count; ++i)
      write<uint16_t>(t, i, encode(f, of(decode(f, read<uint16_t>(a, i)), decode(f, read<uint16_t>(b, i)))));
  };
  switch (dtype) {
    case DType::u8:
      return plain(uint8_t{});
    case DType::i8:
      return plain(int8_t{});
    case DType::u16:
      return plain(uint16_t{});
    case DType::i16:
      return plain(int16_t{});
    case DType::u32:
      return plain(uint32_t{});
    case DType::i32:
      return plain(int32_t{});
    case DType::u64:
      return plain(uint64_t{});
    case DType::i64:
      return plain(int64_t{});
    case DType::f16:
      return half(f16);
    case DType::bf16:
      return half(bf16);
    case DType::f32:
      return plain(float{});
    case DType::f64:
      return plain(double{});
  }
}

Bytes reduced(DType dtype, ReduceOp op, const uint8_t* a, const uint8_t* b, size_t count) {
  Bytes target(count * kernels::item_bytes(dtype));
  for_dtype(dtype, count, target.data(), a, b, [op](auto x, auto y) { return Reference{op, 0}.combine(x, y); });
  return target;
}

Bytes divided(DType dtype, const uint8_t* a, uint32_t divisor, size_t count) {
  Bytes target(count * kernels::item_bytes(dtype));
  for_dtype(dtype, count, target.data(), a, a,
            [divisor](auto x, auto) { return Reference{ReduceOp::sum, divisor}.quotient(x); });
  return target;
}

// ---- Inputs: random bits, which for floats include NaN, infinities and subnormals, with the special ones strewn in.

Bytes random_elements(DType dtype, size_t count, Random& random) {
  const size_t item = kernels::item_bytes(dtype);
  Bytes bytes(count * item);
  const auto strew = [&]<class T>(const std::vector<T>& special, T near_one) {
    for (size_t i = 0; i < count; ++i) {
      const uint64_t dice = random.next();
      // Random bits are mostly numbers too far apart for rounding to matter; a half stays near one.
      if (dice % 4 == 0) write(bytes.data(), i, special[(dice >> 8) % special.size()]);
      if (dice % 4 >= 2)
        write(bytes.data(), i, static_cast<T>(near_one + (dice >> 8 & ((uint64_t{1} << (sizeof(T) * 4)) - 1))));
    }
  };
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next() >> 32);
  switch (dtype) {
    case DType::f16:
      strew(std::vector<uint16_t>{0, 0x8000, 1, 0x8001, 0x3ff, 0x400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0x7e00,
                                  0xfe01, 0xffff},
            uint16_t{0x3bf0});
      break;
    case DType::bf16:
      strew(std::vector<uint16_t>{0, 0x8000, 1, 0x8001, 0x7f, 0x80, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7f81, 0x7fff,
                                  0xff81, 0xffff},
            uint16_t{0x3f70});
      break;
    case DType::f32:
      strew(std::vector<uint32_t>{0, 0x80000000, 1, 0x7fffff, 0x800000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000,
                                  0x7f800001, 0x7fc00123, 0xffffffff},
            0x3f7ff000u);
      break;
    case DType::f64:
      strew(std::vector<uint64_t>{0, 0x8000000000000000, 1, 0x7fefffffffffffff, 0x7ff0000000000000, 0xfff0000000000000,
                                  0x7ff0000000000001, 0x7ff8000000000123, 0xffffffffffffffff},
            uint64_t{0x3feffffff0000000});
      break;
    default:
      break;
  }
  return bytes;
}

// A copy of some bytes at an address that is `shift` past a multiple of 64, between guards that must stay as they are.
class Placed {
 public:
  Placed(const Bytes& content, size_t shift) : size_(content.size()), room_(content.size() + 256, 0xa5) {
    start_ = 64 + (64 - reinterpret_cast<uintptr_t>(room_.data()) % 64) % 64 + shift;
    if (size_ != 0) std::memcpy(at(), content.data(), size_);
  }
  uint8_t* at() { return room_.data() + start_; }
  Bytes content() const {
    return {room_.begin() + static_cast<ptrdiff_t>(start_), room_.begin() + static_cast<ptrdiff_t>(start_ + size_)};
  }
  bool guards_intact() const {
    for (size_t i = 0; i < room_.size(); ++i)
      if ((i < start_ || i >= start_ + size_) && room_[i] != 0xa5) return false;
    return true;
  }

 private:
  size_t size_, start_ = 0;
  Bytes room_;
};

uint32_t crc_bit_by_bit(const uint8_t* bytes, size_t count) {
  uint32_t state = 0xffffffff;
  for (size_t i = 0; i < count; ++i) {
    state ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) state = state & 1 ? state >> 1 ^ 0x82f63b78 : state >> 1;
  }
  return ~state;
}

template <class Test>
void for_every_dtype(Test test) {
  for (size_t d = 0; d < kernels::dtype_count; ++d) test(static_cast<DType>(d), dtype_names[d]);
}

// ---- The tests.

TEST(reduce_equals_the_reference) {
  for_every_dtype([](DType dtype, const char* dtype_name) {
    for (size_t o = 0; o < kernels::reduce_op_count; ++o) {
      Random random;
      for (const size_t count : counts) {
        const auto op = static_cast<ReduceOp>(o);
        const Bytes a = random_elements(dtype, count, random), b = random_elements(dtype, count, random);
        const Bytes expected = reduced(dtype, op, a.data(), b.data(), count);
        const size_t shift = random.next() % 64;
        on_every_level([&](const char* level) {
          Placed x(a, shift), y(b, (shift * 7 + 3) % 64), t(Bytes(a.size()), (shift * 5 + 1) % 64);
          kernels::reduce(dtype, op, t.at(), x.at(), y.at(), count);
          CHECK_MESSAGE(t.content() == expected && t.guards_intact(), "%s %s %s of %zu", level, dtype_name, op_names[o],
                        count);
          CHECK_MESSAGE(x.content() == a && y.content() == b, "%s %s %s changed its inputs", level, dtype_name,
                        op_names[o]);
          kernels::reduce(dtype, op, x.at(), x.at(), y.at(), count);
          CHECK_MESSAGE(x.content() == expected && x.guards_intact(), "%s %s %s of %zu in place", level, dtype_name,
                        op_names[o], count);
        });
      }
    }
  });
}

TEST(divide_equals_the_reference) {
  for_every_dtype([](DType dtype, const char* dtype_name) {
    Random random;
    for (const uint32_t divisor : {0u, 1u, 2u, 3u, 7u, 10u, 255u, 256u, 65535u, 16777217u, 0x80000000u, 0xffffffffu}) {
      for (const size_t count : {size_t{1}, size_t{37}, size_t{2051}}) {
        const Bytes a = random_elements(dtype, count, random);
        const Bytes expected = divisor > 1 ? divided(dtype, a.data(), divisor, count) : a;
        on_every_level([&](const char* level) {
          Placed t(a, random.next() % 64);
          kernels::divide(dtype, t.at(), divisor, count);
          CHECK_MESSAGE(t.content() == expected && t.guards_intact(), "%s %s / %u of %zu", level, dtype_name, divisor,
                        count);
        });
      }
    }
  });
}

// All 65536 numbers, so that no range of the conversions is left to luck.
TEST(sixteen_bit_floats_are_exhaustive) {
  const size_t count = 65536;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Bytes all(count * 2);
    for (size_t i = 0; i < count; ++i) write(all.data(), i, static_cast<uint16_t>(i));
    for (const uint16_t partner : {0x8000, 0x0001, 0x0401, 0x3555, 0x3c01, 0x3f81, 0x7bff, 0xfbff}) {
      Bytes other(count * 2);
      for (size_t i = 0; i < count; ++i) write(other.data(), i, partner);
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::prod, ReduceOp::max}) {
        const Bytes expected = reduced(dtype, op, all.data(), other.data(), count);
        on_every_level([&](const char* level) {
          Bytes t(count * 2);
          kernels::reduce(dtype, op, t.data(), all.data(), other.data(), count);
          CHECK_MESSAGE(t == expected, "%s %s %s with 0x%04x", level, dtype_names[static_cast<size_t>(dtype)],
                        op_names[static_cast<size_t>(op)], partner);
        });
      }
    }
  }
}

TEST(integer_division_is_exact_for_all_16_bit_numbers) {
  const size_t count = 65536;
  Bytes all(count * 2);
  for (size_t i = 0; i < count; ++i) write(all.data(), i, static_cast<uint16_t>(i));
  for (const DType dtype : {DType::u16, DType::i16}) {
    for (uint32_t divisor = 2; divisor < 70000; divisor += 1 + divisor / 5) {
      const Bytes expected = divided(dtype, all.data(), divisor, count);
      on_every_level([&](const char* level) {
        Bytes t = all;
        kernels::divide(dtype, t.data(), divisor, count);
        CHECK_MESSAGE(t == expected, "%s 16-bit / %u", level, divisor);
      });
    }
  }
}

TEST(integer_division_is_exact_next_to_multiples) {
  Random random;
  for (int round = 0; round < 200; ++round) {
    const auto divisor = static_cast<uint32_t>(random.next() >> (32 + random.next() % 31)) | 2;
    Bytes a(64 * 4);
    for (size_t i = 0; i < 64; ++i) {
      const uint64_t multiple = random.next() % (0xffffffffu / divisor + 1) * divisor;
      write(a.data(), i, static_cast<uint32_t>(multiple - random.next() % 2));
    }
    for (const DType dtype : {DType::u32, DType::i32}) {
      const Bytes expected = divided(dtype, a.data(), divisor, 64);
      on_every_level([&](const char* level) {
        Bytes t = a;
        kernels::divide(dtype, t.data(), divisor, 64);
        CHECK_MESSAGE(t == expected, "%s 32-bit / %u", level, divisor);
      });
    }
  }
}

TEST(nan_and_infinity_follow_numpy) {
  const float nan = std::nanf(""), inf = INFINITY;
  const float a[] = {nan, 1, inf, inf, -inf, 0.0f, nan};
  const float b[] = {1, nan, -inf, 1, 1, nan, nan};
  const auto reduce = [&](ReduceOp op) {
    std::vector<float> t(7);
    kernels::reduce(DType::f32, op, t.data(), a, b, 7);
    return t;
  };
  on_every_level([&](const char*) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::prod, ReduceOp::min, ReduceOp::max}) {
      const auto t = reduce(op);
      CHECK(std::isnan(t[0]) && std::isnan(t[1]) && std::isnan(t[5]) && std::isnan(t[6]));
      uint32_t bits;
      std::memcpy(&bits, &t[6], 4);
      CHECK(bits == 0x7fc00000);
    }
    CHECK(std::isnan(reduce(ReduceOp::sum)[2]));
    CHECK(reduce(ReduceOp::min)[2] == -inf && reduce(ReduceOp::min)[3] == 1 && reduce(ReduceOp::max)[4] == 1);
    // A signalling NaN whose payload lies in the bits that bf16 rounds away from f32 must not carry into infinity.
    const uint16_t quiet = 0x7fff, zero = 0;
    uint16_t sum = 0;
    kernels::reduce(DType::bf16, ReduceOp::sum, &sum, &quiet, &zero, 1);
    CHECK(sum == 0x7fc0);
  });
}

TEST(a_step_saves_reduces_divides_and_sums_up) {
  Random random;
  for_every_dtype([&](DType dtype, const char* dtype_name) {
    const size_t item = kernels::item_bytes(dtype);
    // Around the block size, and on both sides of the size from which the backup is streamed.
    for (const size_t bytes : {size_t{0}, size_t{8}, size_t{1000}, size_t{8192}, size_t{8200}, size_t{32760},
                               size_t{32768}, size_t{50008}}) {
      const size_t count = bytes / item;
      for (const ReduceOp op : {ReduceOp::avg, ReduceOp::max}) {
        const uint32_t divisor = op == ReduceOp::avg ? 3 : 0;
        const Bytes a = random_elements(dtype, count, random), b = random_elements(dtype, count, random);
        Bytes expected = reduced(dtype, op, a.data(), b.data(), count);
        if (divisor > 1) expected = divided(dtype, expected.data(), divisor, count);
        const uint32_t crc = crc_bit_by_bit(expected.data(), bytes);
        on_every_level([&](const char* level) {
          Placed x(a, random.next() % 64), y(b, random.next() % 64), backup(Bytes(bytes), random.next() % 64),
              out(Bytes(bytes), 5);
          const uint32_t apart = kernels::reduce_step(dtype, op, out.at(), x.at(), y.at(), count, {}, divisor, true);
          CHECK_MESSAGE(apart == crc && out.content() == expected && x.content() == a, "%s step %s of %zu bytes, apart",
                        level, dtype_name, bytes);
          const uint32_t in_place = kernels::reduce_step(dtype, op, x.at(), x.at(), y.at(), count,
                                                         {backup.at(), count % 2 == 1}, divisor, true);
          CHECK_MESSAGE(in_place == crc && x.content() == expected, "%s step %s of %zu bytes, in place", level,
                        dtype_name, bytes);
          CHECK_MESSAGE(backup.content() == a, "%s step %s of %zu bytes: backup", level, dtype_name, bytes);
          CHECK(x.guards_intact() && out.guards_intact() && backup.guards_intact() && y.content() == b);
          Placed again(a, 9);
          CHECK(kernels::reduce_step(dtype, op, again.at(), again.at(), y.at(), count, {}, divisor, false) == 0);
          CHECK_MESSAGE(again.content() == expected, "%s step %s of %zu bytes, no crc", level, dtype_name, bytes);
        });
      }
    }
  });
}

TEST(overwrite_keeps_the_old_bytes) {
  Random random;
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{777}, size_t{16384}, size_t{32767}, size_t{32768}, size_t{100003}}) {
    const Bytes old = random_elements(DType::u8, bytes, random), fresh = random_elements(DType::u8, bytes, random);
    on_every_level([&](const char* level) {
      Placed target(old, random.next() % 64), source(fresh, random.next() % 64),
          backup(Bytes(bytes), random.next() % 64);
      kernels::overwrite(target.at(), source.at(), bytes, {backup.at(), bytes % 2 == 1});
      CHECK_MESSAGE(target.content() == fresh && backup.content() == old, "%s overwrite of %zu", level, bytes);
      CHECK(target.guards_intact() && backup.guards_intact() && source.content() == fresh);
      Placed bare(old, 1);
      kernels::overwrite(bare.at(), source.at(), bytes, {}, bytes % 2 == 1);
      CHECK_MESSAGE(bare.content() == fresh && bare.guards_intact(), "%s overwrite of %zu without backup", level,
                    bytes);
    });
  }
}

TEST(crc_knows_the_published_vectors) {
  Bytes ascending(32), descending(32);
  for (uint8_t i = 0; i < 32; ++i) ascending[i] = i, descending[i] = static_cast<uint8_t>(31 - i);
  // RFC 3720 B.4: a SCSI Read (10) command.
  const uint8_t command[48] = {0x01, 0xc0, 0, 0, 0, 0, 0,    0, 0,    0, 0, 0,    0, 0, 0, 0,
                               0x14, 0,    0, 0, 0, 0, 0x04, 0, 0,    0, 0, 0x14, 0, 0, 0, 0x18,
                               0x28, 0,    0, 0, 0, 0, 0,    0, 0x02, 0, 0, 0,    0, 0, 0, 0};
  on_every_level([&](const char*) {
    CHECK(crc32c("", 0) == 0);
    CHECK(crc32c("a", 1) == 0xc1d04330);
    CHECK(crc32c("123456789", 9) == 0xe3069283);
    CHECK(crc32c(Bytes(32, 0x00).data(), 32) == 0x8a9136aa);
    CHECK(crc32c(Bytes(32, 0xff).data(), 32) == 0x62a8ab43);
    CHECK(crc32c(ascending.data(), 32) == 0x46dd794e);
    CHECK(crc32c(descending.data(), 32) == 0x113fdb5c);
    CHECK(crc32c(command, 48) == 0xd9963a56);
  });
}

TEST(crc_equals_the_reference_at_every_length) {
  Random random;
  const Bytes bytes = random_elements(DType::u8, 20000, random);
  const auto compare = [&](size_t at, size_t count) {
    const uint32_t expected = crc_bit_by_bit(bytes.data() + at, count);
    on_every_level([&](const char* level) {
      CHECK_MESSAGE(crc32c(bytes.data() + at, count) == expected, "%s crc of %zu at %zu", level, count, at);
    });
  };
  for (size_t count = 0; count < 1400; ++count) compare(count % 67, count);
  for (const size_t count : {3071, 3072, 3073, 4096, 6200, 8192, 16384, 19999}) compare(1, static_cast<size_t>(count));
}

TEST(crc_chains_and_combines) {
  Random random;
  const Bytes bytes = random_elements(DType::u8, 9000, random);
  const uint32_t whole = crc_bit_by_bit(bytes.data(), bytes.size());
  on_every_level([&](const char* level) {
    for (const size_t cut :
         {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{1024}, size_t{4097}, size_t{8999}, size_t{9000}}) {
      const uint32_t a = crc32c(bytes.data(), cut);
      CHECK_MESSAGE(crc32c(bytes.data() + cut, bytes.size() - cut, a) == whole, "%s chain at %zu", level, cut);
      const uint32_t b = crc32c(bytes.data() + cut, bytes.size() - cut);
      CHECK_MESSAGE(crc32c_combine(a, b, bytes.size() - cut) == whole, "%s combine at %zu", level, cut);
    }
  });
  // Lengths whose bits do not fit in memory: joining is associative.
  const size_t far = (size_t{1} << 40) + 12345;
  CHECK(crc32c_combine(crc32c_combine(1, 2, far), 3, 77) == crc32c_combine(1, crc32c_combine(2, 3, 77), far + 77));
}

TEST(levels_are_named_and_refused) {
  CHECK(!kernels::set_cpu_level("mmx"));
  CHECK(!kernels::set_cpu_level(""));
  CHECK(kernels::set_cpu_level("generic"));
}

}  // namespace
