// SPDX-License-Identifier: Apache-2.0

#include "snapshot/receive/arena_shelf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <utility>

#include "core/base/digest.h"
#include "core/base/fault_point.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr uint64_t kLedgerMagic = 0x7265676465'6c6b63;  // "ckledger"
constexpr uint64_t kMaxLedger = uint64_t{256} << 20;
constexpr std::string_view kPrefix = "ckptfs-";
constexpr std::string_view kArenaSuffix = "-arena";
constexpr std::string_view kLedgerSuffix = "-ledger";
constexpr timeval kHandOverPatience{60, 0};

struct BlockHead {
  uint64_t magic = kLedgerMagic;
  uint64_t generation = 0;
  uint64_t bytes = 0;
  Digest body;
};

void AppendText(std::string& body, std::string_view text) {
  const auto bytes = static_cast<uint32_t>(text.size());
  body.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
  body.append(text);
}

// Returns the next text of a body; nothing at its end or where it is damaged.
std::optional<std::string_view> TakeText(std::string_view& body) {
  uint32_t bytes = 0;
  if (body.size() < sizeof bytes) return std::nullopt;
  std::memcpy(&bytes, body.data(), sizeof bytes);
  body.remove_prefix(sizeof bytes);
  if (bytes > body.size()) return std::nullopt;
  const std::string_view text = body.substr(0, bytes);
  body.remove_prefix(bytes);
  return text;
}

struct Block {
  uint64_t generation = 0;
  std::string body;
};

std::optional<Block> ReadBlock(int ledger, uint64_t at) {
  BlockHead head;
  if (pread(ledger, &head, sizeof head, static_cast<off_t>(at)) != ssize_t{sizeof head} ||
      head.magic != kLedgerMagic || head.bytes > kMaxLedger) {
    return std::nullopt;
  }
  struct stat info;
  if (fstat(ledger, &info) != 0 ||
      at + sizeof head + head.bytes > static_cast<uint64_t>(info.st_size)) {
    return std::nullopt;
  }
  Block block{head.generation, std::string(head.bytes, '\0')};
  const ssize_t got =
      pread(ledger, block.body.data(), head.bytes, static_cast<off_t>(at + sizeof head));
  const bool whole = got == static_cast<ssize_t>(head.bytes);
  if (!whole || DigestOf(block.body) != head.body) return std::nullopt;
  return block;
}

struct Ledger {
  uint64_t generation = 0;
  std::vector<SnapshotMessage> said;
};

// Returns what a ledger of this store and user says; nothing if it is another's.
std::optional<Ledger> ReadLedger(int ledger, const std::string& store) {
  std::optional<Block> block = ReadBlock(ledger, 0);
  auto other = ReadBlock(ledger, kLedgerSlot);
  if (!block || (other && other->generation > block->generation)) block.swap(other);
  if (!block) return std::nullopt;
  std::string_view body = block->body;
  uint32_t uid = 0;
  if (body.size() < sizeof uid) return std::nullopt;
  std::memcpy(&uid, body.data(), sizeof uid);
  body.remove_prefix(sizeof uid);
  if (uid != geteuid() || TakeText(body) != store) return std::nullopt;
  Ledger read{block->generation, {}};
  while (const auto text = TakeText(body)) {
    auto message = DecodeSnapshotMessage(*text);
    if (!message) return std::nullopt;
    read.said.push_back(*std::move(message));
  }
  if (!body.empty() || read.said.empty()) return std::nullopt;
  return read;
}

std::string NewId() {
  static std::atomic<uint64_t> count{0};
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return DigestOf(StrCat(getpid(), " ", now.tv_sec, " ", now.tv_nsec, " ", ++count)).Hex();
}

bool IsSameFile(int one, int other) {
  struct stat first, second;
  return fstat(one, &first) == 0 && fstat(other, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

}  // namespace

ShelfPlace::ShelfPlace(std::shared_ptr<ArenaShelf> shelf, std::string id, Descriptor ledger)
    : shelf_(std::move(shelf)), id_(std::move(id)), ledger_(std::move(ledger)) {}

ShelfPlace::~ShelfPlace() { shelf_->LetGo(id_); }

void ShelfPlace::Add(uint64_t attempt, std::vector<SnapshotMessage> said) {
  MutexLock lock(mutex_);
  said_[attempt] = std::move(said);
  Write();
}

void ShelfPlace::Remove(uint64_t attempt) {
  if (shelf_->frozen()) return;
  MutexLock lock(mutex_);
  if (said_.erase(attempt) != 0) Write();
}

void ShelfPlace::Write() {
  std::string body;
  const uint32_t uid = geteuid();
  body.append(reinterpret_cast<const char*>(&uid), sizeof uid);
  AppendText(body, shelf_->store_);
  AppendText(body, EncodeSnapshotMessage(greeting_));
  for (const auto& [attempt, messages] : said_) {
    for (const SnapshotMessage& message : messages) {
      AppendText(body, EncodeSnapshotMessage(message));
    }
  }
  BlockHead head;
  head.generation = ++generation_;
  head.bytes = body.size();
  head.body = DigestOf(body);
  const uint64_t at = generation_ % 2 * kLedgerSlot;
  FaultPoint();
  // A block that is not written whole has a wrong digest; then the other block counts.
  if (pwrite(ledger_.get(), &head, sizeof head, static_cast<off_t>(at)) < 0) return;
  FaultPoint();
  if (pwrite(ledger_.get(), body.data(), body.size(), static_cast<off_t>(at + sizeof head)) < 0) {
    return;
  }
  FaultPoint();
}

ArenaShelf::ArenaShelf(std::unique_ptr<const DescriptorStore> manager, std::string store)
    : manager_(std::move(manager)), store_(std::move(store)) {}

std::shared_ptr<ArenaShelf> ArenaShelf::FromEnvironment(std::string store) {
  std::vector<DescriptorStore::Kept> kept = DescriptorStore::Take(kPrefix);
  auto manager = DescriptorStore::Find();
  if (!manager) return nullptr;
  return Open(std::move(manager), std::move(kept), std::move(store));
}

std::shared_ptr<ArenaShelf> ArenaShelf::Open(std::unique_ptr<const DescriptorStore> manager,
                                             std::vector<DescriptorStore::Kept> kept,
                                             std::string store) {
  std::shared_ptr<ArenaShelf> shelf(new ArenaShelf(std::move(manager), std::move(store)));
  shelf->Sort(std::move(kept));
  return shelf;
}

void ArenaShelf::Sort(std::vector<DescriptorStore::Kept> kept) {
  std::map<std::string, Left> found;
  for (DescriptorStore::Kept& one : kept) {
    const std::string_view name = one.name;
    if (!name.starts_with(kPrefix)) continue;
    const bool arena = name.ends_with(kArenaSuffix);
    if (!arena && !name.ends_with(kLedgerSuffix)) continue;
    const size_t rest = kPrefix.size() + (arena ? kArenaSuffix : kLedgerSuffix).size();
    const std::string id(name.substr(kPrefix.size(), name.size() - rest));
    (arena ? found[id].arena : found[id].ledger) = std::move(one.descriptor);
  }
  for (auto& [id, left] : found) {
    auto ledger = left.ledger.valid() ? ReadLedger(left.ledger.get(), store_) : std::nullopt;
    if (!left.arena.valid() || !ledger) {
      Forget(id);
      continue;
    }
    left.id = id;
    left.generation = ledger->generation;
    left.said = std::move(ledger->said);
    MutexLock lock(mutex_);
    left_.push_back(std::make_shared<Left>(std::move(left)));
  }
}

void ArenaShelf::Forget(const std::string& id) const {
  manager_->Remove(StrCat(kPrefix, id, kArenaSuffix));
  manager_->Remove(StrCat(kPrefix, id, kLedgerSuffix));
}

std::shared_ptr<ShelfPlace> ArenaShelf::Place(int arena, const SnapshotMessage& greeting) {
  std::shared_ptr<Left> left;
  {
    MutexLock lock(mutex_);
    const auto at = std::find_if(left_.begin(), left_.end(), [&](const auto& one) {
      return IsSameFile(one->arena.get(), arena);
    });
    if (at != left_.end()) {
      left = *at;
      left_.erase(at);
    }
  }
  const std::string id = left ? left->id : NewId();
  Descriptor ledger(left ? fcntl(left->ledger.get(), F_DUPFD_CLOEXEC, 0)
                         : memfd_create("ckptfs-ledger", MFD_CLOEXEC));
  if (!ledger.valid()) return nullptr;
  if (!left && (fchmod(ledger.get(), 0600) != 0 ||
                !manager_->Put(StrCat(kPrefix, id, kArenaSuffix), arena) ||
                !manager_->Put(StrCat(kPrefix, id, kLedgerSuffix), ledger.get()))) {
    return nullptr;
  }
  std::shared_ptr<ShelfPlace> place(new ShelfPlace(shared_from_this(), id, std::move(ledger)));
  MutexLock lock(place->mutex_);
  place->greeting_ = greeting;
  if (!left) return place;
  manager_->Note(StrCat(kPrefix, id, kArenaSuffix), left->arena.get());
  manager_->Note(StrCat(kPrefix, id, kLedgerSuffix), left->ledger.get());
  place->generation_ = left->generation;
  for (size_t i = 1; i < left->said.size(); ++i) {
    place->said_[left->said[i].attempt].push_back(left->said[i]);
  }
  return place;
}

Status ArenaShelf::Say(const Left& left) const {
  CKPT_ASSIGN_OR_RETURN(const Descriptor socket, ConnectForSnapshots(store_));
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    setsockopt(socket.get(), SOL_SOCKET, option, &kHandOverPatience, sizeof kHandOverPatience);
  }
  SnapshotMessage greeting = left.said.front();
  greeting.step = 1;
  CKPT_RETURN_IF_ERROR(SendSnapshotMessage(socket.get(), greeting, left.arena.get()));
  CKPT_ASSIGN_OR_RETURN(const Incoming answer, ReceiveSnapshotMessage(socket.get()));
  if (answer.kind != Incoming::Kind::kMessage || answer.message.word != SnapshotWord::kWelcome) {
    return Fail(ErrorCode::kPermission, answer.message.text);
  }
  for (size_t i = 1; i < left.said.size(); ++i) {
    SnapshotMessage message = left.said[i];
    if (message.word == SnapshotWord::kBegin) message.chunk = 1;
    CKPT_RETURN_IF_ERROR(SendSnapshotMessage(socket.get(), message));
  }
  // The daemon closes it when it has heard all.
  shutdown(socket.get(), SHUT_WR);
  while (true) {
    CKPT_ASSIGN_OR_RETURN(const Incoming heard, ReceiveSnapshotMessage(socket.get()));
    if (heard.kind == Incoming::Kind::kClosed) return {};
    if (heard.kind == Incoming::Kind::kNothing) return Fail(ErrorCode::kIo, "no answer");
    if (heard.message.word == SnapshotWord::kRefused) {
      return Fail(ErrorCode::kPermission, heard.message.text);
    }
  }
}

void ArenaShelf::HandOver(const std::function<void(std::string_view line)>& log) {
  std::vector<std::shared_ptr<Left>> left;
  {
    MutexLock lock(mutex_);
    left = left_;
  }
  for (const auto& one : left) {
    // An arena in which nothing was whole is not worth a message.
    const Status said = one->said.size() > 1 ? Say(*one) : Status();
    if (!said) log(StrCat("an arena of before: ", said.error().message));
    {
      MutexLock lock(mutex_);
      if (std::erase(left_, one) == 0) continue;  // it has a place: its rank came, or we did
    }
    Forget(one->id);
  }
}

void ArenaShelf::Freeze() {
  MutexLock lock(mutex_);
  frozen_ = true;
}

void ArenaShelf::Thaw() {
  std::vector<std::string> ids;
  {
    MutexLock lock(mutex_);
    frozen_ = false;
    ids.swap(let_go_);
  }
  for (const std::string& id : ids) Forget(id);
}

void ArenaShelf::LetGo(const std::string& id) {
  {
    MutexLock lock(mutex_);
    if (frozen_) return let_go_.push_back(id);
  }
  Forget(id);
}

bool ArenaShelf::frozen() const {
  MutexLock lock(mutex_);
  return frozen_;
}

}  // namespace ckptfs
