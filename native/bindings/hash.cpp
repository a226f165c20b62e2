#include "ringfold/hash.hpp"

#include "convert.hpp"

namespace ringfold {

namespace {

// The memory of bytes, a NumPy array, anything with the buffer protocol that is contiguous; read-only is fine.
class View {
 public:
  explicit View(const nb::object& owner) {
    if (PyObject_GetBuffer(owner.ptr(), &view_, PyBUF_SIMPLE) != 0) nb::raise_python_error();
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() { PyBuffer_Release(&view_); }

  const void* at() const { return view_.buf; }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

std::uint64_t block(const nb::object& buffer) {
  const View view(buffer);
  nb::gil_scoped_release released;
  return hash_block(view.at(), view.bytes());
}

nb::bytes blocks(const nb::object& buffer, unsigned threads) {
  const View view(buffer);
  std::vector<std::uint64_t> hashes(hash_block_count(view.bytes()));
  {
    nb::gil_scoped_release released;
    hash_blocks(view.at(), view.bytes(), hashes.data(), threads);
  }
  return nb::bytes(hashes.data(), hashes.size() * sizeof(std::uint64_t));
}

std::uint64_t root(const nb::bytes& hashes, std::uint64_t total_bytes) {
  return hash_root(hashes.c_str(), hashes.size(), total_bytes);
}

}  // namespace

void bind_hash(nb::module_& m) {
  m.def("hash_block", &block, "buffer"_a, "The rf64 hash of one block.");
  m.def("hash_blocks", &blocks, "buffer"_a, "threads"_a,
        "The rf64 hashes of all blocks, 8 little-endian bytes each; `threads` 0 means one per core.");
  m.def("hash_root", &root, "hashes"_a, "total_bytes"_a,
        "The rf64 root of an array, from what `hash_blocks` gave for it and its size.");
}

}  // namespace ringfold
