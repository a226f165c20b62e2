// A word in shared memory by which a process shows its neighbours that it has died.
//
// The kernel closes a dead process's sockets only after it has freed its memory: about 80 ms for each GiB. But before
// that it marks every robust mutex that one of its threads held. So a process holds one as long as it lives, in a page
// that its neighbours have mapped, and its guardian, which sleeps until the mark comes. They can only read it: a mutex
// has pointers in it.
#pragma once

#include <memory>

namespace ringfold {

class Life {
 public:
  // nullptr: there is no such memory here.
  static std::unique_ptr<Life> create();
  ~Life();
  Life(const Life&) = delete;
  Life& operator=(const Life&) = delete;

  // For the neighbours, and the guardian.
  int fd() const { return fd_; }
  // From the thread that lives as long as the process is to be known alive, and by the same thread at its regular end.
  void hold();
  void let_go();
  // In the child of a fork, which is another process.
  void forked_child();

 private:
  Life(int fd, void* page) : fd_(fd), page_(page) {}

  int fd_;
  void* page_;
};

// The page of another process.
class LifeView {
 public:
  // nullptr: the file is not what Life makes.
  static std::shared_ptr<const LifeView> open(int fd);
  ~LifeView();
  LifeView(const LifeView&) = delete;
  LifeView& operator=(const LifeView&) = delete;

  // It has ended without letting go.
  bool has_died() const;

 private:
  explicit LifeView(const void* page) : page_(page) {}

  const void* page_;
};

}  // namespace ringfold
