// SPDX-License-Identifier: Apache-2.0

#include "core/peer/tcp_transport.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstring>
#include <optional>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;

constexpr int kBacklog = 64;
constexpr size_t kTextPiece = 64 << 10;  // a text takes memory as it comes
constexpr size_t kMaxHost = 255;
constexpr int kSilentMs = 30'000;  // of a machine that acknowledges nothing
constexpr int kProbeSeconds = 10;  // of a link on which nothing is sent

struct Addresses {
  ~Addresses() {
    if (list != nullptr) freeaddrinfo(list);
  }
  addrinfo* list = nullptr;
};

Status Resolve(const TcpAddress& address, int flags, Addresses& out) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  const int error =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &out.list);
  if (error == 0 && out.list != nullptr) return {};
  return Fail(ErrorCode::kNotFound, StrCat(address.host, ": ", gai_strerror(error)));
}

std::string TextOf(const sockaddr_storage& address, socklen_t length) {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host, sizeof host, port,
                  sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "?";
  }
  return address.ss_family == AF_INET6 ? StrCat("[", host, "]:", port) : StrCat(host, ":", port);
}

std::string NameOf(int fd, int (*call)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  return call(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? TextOf(address, length)
                                                                       : "?";
}

bool IsWildcard(const addrinfo& info) {
  if (info.ai_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(info.ai_addr)->sin_addr.s_addr == INADDR_ANY;
  }
  const auto* six = reinterpret_cast<const sockaddr_in6*>(info.ai_addr);
  return IN6_IS_ADDR_UNSPECIFIED(&six->sin6_addr) != 0;
}

class TcpLink final : public PeerLink {
 public:
  TcpLink(Descriptor socket, milliseconds patience)
      : socket_(std::move(socket)),
        patience_(patience),
        about_(StrCat(NameOf(socket_.get(), getsockname), " -> ",
                      NameOf(socket_.get(), getpeername))) {
    const int on = 1;
    (void)setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(socket_.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)setsockopt(socket_.get(), IPPROTO_TCP, TCP_KEEPIDLE, &kProbeSeconds,
                     sizeof kProbeSeconds);
    (void)setsockopt(socket_.get(), IPPROTO_TCP, TCP_KEEPINTVL, &kProbeSeconds,
                     sizeof kProbeSeconds);
    (void)setsockopt(socket_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &kSilentMs, sizeof kSilentMs);
  }

  Status Send(PeerFrame frame, PeerSpans payload) override {
    frame.payload_bytes = 0;
    for (const auto& span : payload) frame.payload_bytes += span.size();
    const auto head = EncodePeerFrame(frame);
    std::vector<iovec> pieces;
    const auto add = [&](const void* bytes, size_t size) {
      if (size != 0) pieces.push_back({const_cast<void*>(bytes), size});
    };
    add(head.data(), head.size());
    add(frame.text.data(), frame.text.size());
    for (const auto& span : payload) add(span.data(), span.size());
    return SendAll(pieces);
  }

  Result<PeerFrame> Receive(uint64_t max_text, milliseconds wait) override {
    std::array<std::byte, kPeerFrameBytes> head;
    CKPT_RETURN_IF_ERROR(Take(head, First{wait}));
    CKPT_ASSIGN_OR_RETURN(PeerHeader header, DecodePeerHeader(head, max_text));
    std::string& text = header.frame.text;
    while (text.size() < header.text_bytes) {
      const size_t had = text.size();
      text.resize(std::min<size_t>(header.text_bytes, had + kTextPiece));
      CKPT_RETURN_IF_ERROR(Take(std::as_writable_bytes(std::span(text).subspan(had))));
    }
    CKPT_RETURN_IF_ERROR(CheckPeerFrame(header, head, text));
    return std::move(header.frame);
  }

  Status ReceivePayload(std::span<std::byte> out) override { return Take(out); }
  void EndBy(std::optional<std::chrono::steady_clock::time_point> end) override { end_ = end; }
  void Close() override {
    closed_ = true;
    shutdown(socket_.get(), SHUT_RDWR);
  }
  std::string about() const override { return about_; }

 private:
  Status Wait(short event, milliseconds limit) const {
    pollfd one{socket_.get(), event, 0};
    auto end = std::chrono::steady_clock::now() + limit;
    if (end_) end = std::min(end, *end_);
    for (;;) {
      const auto left =
          std::chrono::duration_cast<milliseconds>(end - std::chrono::steady_clock::now());
      if (closed_) return Fail(ErrorCode::kIo, StrCat(about_, ": was closed"));
      const int ready = poll(&one, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
      if (ready > 0) return {};
      if (ready < 0 && errno == EINTR) continue;
      if (ready < 0) return Fail(ErrnoError(errno, about_));
      if (end_ && end == *end_) return Fail(ErrorCode::kIo, StrCat(about_, ": it took too long"));
      return Fail(ErrorCode::kIo, StrCat(about_, ": nothing moved for ", limit.count(), " ms"));
    }
  }

  Error Left(ErrorCode code) const { return {code, StrCat(about_, ": it has left")}; }
  static bool IsGone(int error) { return error == ECONNRESET || error == EPIPE; }

  Status SendAll(std::vector<iovec>& pieces) {
    for (size_t at = 0; at < pieces.size();) {
      msghdr message{};
      message.msg_iov = &pieces[at];
      message.msg_iovlen = std::min<size_t>(pieces.size() - at, IOV_MAX);
      ssize_t sent = sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        CKPT_RETURN_IF_ERROR(Wait(POLLOUT, patience_));
        continue;
      }
      if (sent < 0 && IsGone(errno)) return Fail(Left(ErrorCode::kNotFound));
      if (sent < 0) return Fail(ErrnoError(errno, about_));
      for (; at < pieces.size() && static_cast<size_t>(sent) >= pieces[at].iov_len; ++at) {
        sent -= static_cast<ssize_t>(pieces[at].iov_len);
      }
      if (sent == 0) continue;
      pieces[at].iov_base = static_cast<char*>(pieces[at].iov_base) + sent;
      pieces[at].iov_len -= static_cast<size_t>(sent);
    }
    return {};
  }

  // At the beginning of a frame the peer may take its time, or leave instead.
  struct First {
    milliseconds wait;
  };
  Status Take(std::span<std::byte> out, std::optional<First> first = {}) {
    while (!out.empty()) {
      const ssize_t got = recv(socket_.get(), out.data(), out.size(), MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        CKPT_RETURN_IF_ERROR(Wait(POLLIN, first ? first->wait : patience_));
        continue;
      }
      if (got == 0 || (got < 0 && IsGone(errno))) {
        return Fail(Left(first ? ErrorCode::kNotFound : ErrorCode::kIo));
      }
      if (got < 0) return Fail(ErrnoError(errno, about_));
      first.reset();
      out = out.subspan(static_cast<size_t>(got));
    }
    return {};
  }

  const Descriptor socket_;
  const milliseconds patience_;
  const std::string about_;
  std::atomic<bool> closed_{false};
  std::optional<std::chrono::steady_clock::time_point> end_;  // of all calls
};

class TcpListener final : public PeerListener {
 public:
  TcpListener(Descriptor socket, Descriptor wake, std::string address,
              TcpTransport::Options options)
      : socket_(std::move(socket)),
        wake_(std::move(wake)),
        address_(std::move(address)),
        options_(std::move(options)) {}

  Result<std::unique_ptr<PeerLink>> Accept() override {
    for (;;) {
      pollfd events[] = {{socket_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
      if (poll(events, 2, -1) < 0 && errno != EINTR) return Fail(ErrnoError(errno, address_));
      if (closed_) return Fail(ErrorCode::kNotFound, StrCat(address_, ": was closed"));
      Descriptor link(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (link.valid()) {
        return std::make_unique<TcpLink>(std::move(link), options_.patience);
      }
      // Out of descriptors, say: the caller pauses.
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
        return Fail(ErrnoError(errno, address_));
      }
    }
  }
  void Close() override {
    closed_ = true;
    const uint64_t one = 1;
    if (write(wake_.get(), &one, sizeof one) < 0) return;
  }
  std::string address() const override { return address_; }

 private:
  const Descriptor socket_;
  const Descriptor wake_;
  const std::string address_;
  const TcpTransport::Options options_;
  std::atomic<bool> closed_{false};
};

Status WaitConnected(int fd, milliseconds patience, const std::string& address) {
  pollfd one{fd, POLLOUT, 0};
  int ready = 0;
  do {
    ready = poll(&one, 1, static_cast<int>(patience.count()));
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) {
    return Fail(ErrorCode::kIo, StrCat(address, ": no answer for ", patience.count(), " ms"));
  }
  int error = ready < 0 ? errno : 0;
  socklen_t length = sizeof error;
  if (ready > 0) (void)getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0 ? Status() : Fail(ErrnoError(error, address));
}

}  // namespace

TcpTransport::TcpTransport() : options_() {}

Result<TcpAddress> ParseTcpAddress(std::string_view text) {
  TcpAddress address;
  std::string_view port;
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string_view::npos) return Refuse("'", text, "': no ] after an IPv6 address");
    address.host = text.substr(1, end - 1);
    text.remove_prefix(end + 1);
    if (!text.empty() && !text.starts_with(':')) return Refuse("'", text, "' follows an address");
    port = text.empty() ? text : text.substr(1);
  } else {
    const size_t colon = text.find(':');
    if (colon != text.rfind(':')) return Refuse("'", text, "': an IPv6 address stands in brackets");
    address.host = text.substr(0, colon);
    port = colon == std::string_view::npos ? std::string_view() : text.substr(colon + 1);
    if (colon != std::string_view::npos && port.empty()) return Refuse("'", text, "': no port");
  }
  if (address.host.empty() || address.host.size() > kMaxHost ||
      address.host.find('\0') != std::string::npos) {
    return Refuse("an address is HOST or HOST:PORT");
  }
  if (port.empty()) return address;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (error == std::errc() && end == port.data() + port.size()) return address;
  return Refuse("'", port, "' is not a port");
}

Result<std::unique_ptr<PeerLink>> TcpTransport::Connect(const std::string& address) {
  CKPT_ASSIGN_OR_RETURN(const TcpAddress to, ParseTcpAddress(address));
  Addresses targets;
  CKPT_RETURN_IF_ERROR(Resolve(to, AI_NUMERICHOST, targets));
  Descriptor socket(
      ::socket(targets.list->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return Fail(ErrnoError(errno, address));
  if (!options_.from.empty()) {
    Addresses sources;
    CKPT_RETURN_IF_ERROR(Resolve({options_.from, 0}, AI_PASSIVE, sources));
    if (bind(socket.get(), sources.list->ai_addr, sources.list->ai_addrlen) != 0) {
      return Fail(ErrnoError(errno, options_.from));
    }
  }
  if (connect(socket.get(), targets.list->ai_addr, targets.list->ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return Fail(ErrnoError(errno, address));
    CKPT_RETURN_IF_ERROR(WaitConnected(socket.get(), options_.patience, address));
  }
  return std::make_unique<TcpLink>(std::move(socket), options_.patience);
}

Result<std::unique_ptr<PeerListener>> TcpTransport::Listen(const std::string& address) {
  CKPT_ASSIGN_OR_RETURN(const TcpAddress at, ParseTcpAddress(address));
  Addresses found;
  CKPT_RETURN_IF_ERROR(Resolve(at, AI_PASSIVE, found));
  if (IsWildcard(*found.list)) {
    return Refuse(address, " stands for all interfaces; name the one that peers are to use");
  }
  Descriptor socket(::socket(found.list->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  Descriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!socket.valid() || !wake.valid()) return Fail(ErrnoError(errno, address));
  const int on = 1;
  (void)setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(socket.get(), found.list->ai_addr, found.list->ai_addrlen) != 0 ||
      listen(socket.get(), kBacklog) != 0) {
    return Fail(ErrnoError(errno, address));
  }
  std::string name = NameOf(socket.get(), getsockname);
  return std::make_unique<TcpListener>(std::move(socket), std::move(wake), std::move(name),
                                       options_);
}

}  // namespace ckptfs
