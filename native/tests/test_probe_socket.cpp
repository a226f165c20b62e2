// The prober with its socket and thread: three nodes on loopback, steered from other threads all the while.
#include <chrono>
#include <memory>
#include <thread>

#include "check.hpp"
#include "ringfold/probe_socket.hpp"

using namespace ringfold;
using namespace ringfold::probe;

namespace {

constexpr Ns us = 1'000, s = 1'000'000'000;

std::vector<std::unique_ptr<Prober>> three(bool user_stamps) {
  std::vector<std::unique_ptr<Prober>> nodes;
  for (Node i = 0; i < 3; ++i) {
    nodes.push_back(std::make_unique<Prober>(
        Settings{.node = i, .host = "127.0.0.1", .offset = 1'000'000 * Ns{i}, .user_stamps = user_stamps}));
  }
  return nodes;
}

void configure(std::vector<std::unique_ptr<Prober>>& nodes, std::uint8_t key) {
  for (Node i = 0; i < 3; ++i) {
    std::vector<Neighbour> others;
    for (Node j = 0; j < 3; ++j) {
      if (i != j) others.push_back({j, "127.0.0.1", nodes[j]->port()});
    }
    nodes[i]->configure(Key{key}, others, others);
  }
}

// Rows of node 0 until there are so many, or half a minute is over.
std::size_t rows_of_first(std::vector<std::unique_ptr<Prober>>& nodes, std::size_t wanted, bool& causal) {
  std::size_t count = 0;
  const Ns deadline = raw_now() + 30 * s;
  while (count < wanted && raw_now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    for (const Window& window : nodes[0]->rotate()) {
      const Ns ahead = 1'000'000 * Ns{window.dst};
      for (const Row& row : window.rows) {
        if (row[0] != 0 && row[1] != 0) causal = causal && row[1] - row[0] > ahead;
        if (row[4] != 0 && row[5] != 0) causal = causal && row[5] - row[4] > -ahead;
        ++count;
      }
    }
  }
  return count;
}

void rows_come_and_are_causal(bool user_stamps) {
  auto nodes = three(user_stamps);
  configure(nodes, 1);
  for (auto& node : nodes) node->resume(200 * us, 500 * us);
  bool causal = true;
  CHECK(rows_of_first(nodes, 200, causal) >= 200);
  CHECK(causal);
  CHECK(nodes[0]->stats().user_stamps == user_stamps);
  CHECK(nodes[0]->stats().cpu > 0);
}

TEST(steering_from_many_threads_does_no_harm) {
  auto nodes = three(false);
  configure(nodes, 1);
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    for (int i = 0; i < 500; ++i) configure(nodes, static_cast<std::uint8_t>(i));
  });
  for (auto& node : nodes) {
    threads.emplace_back([&] {
      for (int i = 0; i < 3'000; ++i) {
        node->resume(100 * us, 200 * us);
        node->rotate();
        node->pause();
        node->stats();
        node->pretend_step(1'000'000);
        node->utc();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  configure(nodes, 7);
  for (auto& node : nodes) node->resume(200 * us, 500 * us);
  bool causal = true;
  CHECK(rows_of_first(nodes, 50, causal) >= 50);
  CHECK(causal);
  for (auto& node : nodes) node->shutdown();
}

TEST(rows_with_kernel_stamps_come_and_are_causal) { rows_come_and_are_causal(false); }

TEST(rows_with_user_stamps_come_and_are_causal) { rows_come_and_are_causal(true); }

}  // namespace
