#include "engine/sealed_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace ringfold {
namespace {

constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

int make_file(const char* name, std::size_t bytes) {
  // Kernels from 6.3 on warn without NOEXEC_SEAL, older ones do not know it.
  int fd = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0) fd = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  if (::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0) return fd;
  ::close(fd);
  return -1;
}

bool seal_file(int fd, bool for_others_read_only) {
  return ::fcntl(fd, F_ADD_SEALS, for_others_read_only ? seals | F_SEAL_FUTURE_WRITE : seals) == 0;
}

bool is_sealed_file(int fd, std::size_t bytes) {
  struct stat facts{};
  const int has = ::fcntl(fd, F_GET_SEALS);
  return has >= 0 && (has & seals) == seals && (has & F_SEAL_WRITE) == 0 && ::fstat(fd, &facts) == 0 &&
         S_ISREG(facts.st_mode) && facts.st_size == static_cast<off_t>(bytes);
}

}  // namespace ringfold
