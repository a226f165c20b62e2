// The text of an errno. strerror() may return a buffer that all threads share.
#pragma once

#include <cstring>
#include <string>

namespace ringfold {

inline std::string error_text(int error) {
  char buffer[128];
  // GNU's strerror_r returns the text, which need not be in the buffer.
  return ::strerror_r(error, buffer, sizeof buffer);
}

}  // namespace ringfold
