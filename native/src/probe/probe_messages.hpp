// Messages in batches, as the kernel takes and gives them, and what it notes beside them: stamps and errors.
#pragma once

#include <linux/errqueue.h>
#include <linux/net_tstamp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "ringfold/probe.hpp"

namespace ringfold::probe {

inline constexpr std::size_t batch = 64;
inline constexpr unsigned stamp_flags = SOF_TIMESTAMPING_TX_SOFTWARE | SOF_TIMESTAMPING_RX_SOFTWARE |
                                        SOF_TIMESTAMPING_SOFTWARE | SOF_TIMESTAMPING_OPT_TSONLY;

// Room for one batch of messages in or out, wired once.
struct Messages {
  struct Room {
    alignas(cmsghdr) std::array<std::uint8_t, 256> control;
    sockaddr_storage name;
    std::array<std::uint8_t, 64> bytes;
    iovec piece;
  };
  std::array<Room, batch> rooms{};
  std::array<mmsghdr, batch> headers{};

  void make_ready(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      Room& room = rooms[i];
      room.piece = {room.bytes.data(), room.bytes.size()};
      msghdr& header = headers[i].msg_hdr;
      header = {};
      header.msg_name = &room.name;
      header.msg_namelen = sizeof room.name;
      header.msg_iov = &room.piece;
      header.msg_iovlen = 1;
      header.msg_control = room.control.data();
      header.msg_controllen = room.control.size();
    }
  }

  void put(std::size_t i, const Wire& wire, const Endpoint& to, bool without_stamp) {
    Room& room = rooms[i];
    std::memcpy(room.bytes.data(), wire.data(), wire.size());
    std::memcpy(&room.name, to.bytes.data(), to.length);
    room.piece = {room.bytes.data(), wire.size()};
    msghdr& header = headers[i].msg_hdr;
    header = {};
    header.msg_name = &room.name;
    header.msg_namelen = to.length;
    header.msg_iov = &room.piece;
    header.msg_iovlen = 1;
    if (!without_stamp) return;
    header.msg_control = room.control.data();
    header.msg_controllen = CMSG_SPACE(sizeof(std::uint32_t));
    cmsghdr* no_stamp = CMSG_FIRSTHDR(&header);
    no_stamp->cmsg_level = SOL_SOCKET;
    no_stamp->cmsg_type = SO_TIMESTAMPING;
    no_stamp->cmsg_len = CMSG_LEN(sizeof(std::uint32_t));
    std::memset(CMSG_DATA(no_stamp), 0, sizeof(std::uint32_t));
  }
};

struct Notes {
  Ns real = 0;
  bool is_stamp = false, is_icmp = false;
  std::uint32_t id = 0;
};

inline Notes read_notes(msghdr& header) {
  Notes notes;
  for (cmsghdr* each = CMSG_FIRSTHDR(&header); each != nullptr; each = CMSG_NXTHDR(&header, each)) {
    if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SO_TIMESTAMPING) {
      scm_timestamping stamps;
      std::memcpy(&stamps, CMSG_DATA(each), sizeof stamps);
      notes.real = Ns{stamps.ts[0].tv_sec} * 1'000'000'000 + stamps.ts[0].tv_nsec;
    } else if ((each->cmsg_level == SOL_IP && each->cmsg_type == IP_RECVERR) ||
               (each->cmsg_level == SOL_IPV6 && each->cmsg_type == IPV6_RECVERR)) {
      sock_extended_err error;
      std::memcpy(&error, CMSG_DATA(each), sizeof error);
      notes.is_stamp = error.ee_origin == SO_EE_ORIGIN_TIMESTAMPING && error.ee_errno == ENOMSG;
      notes.is_icmp = error.ee_origin == SO_EE_ORIGIN_ICMP || error.ee_origin == SO_EE_ORIGIN_ICMP6;
      notes.id = error.ee_data;
    }
  }
  return notes;
}

}  // namespace ringfold::probe
