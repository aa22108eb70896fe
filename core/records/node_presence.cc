// SPDX-License-Identifier: Apache-2.0
#include "core/records/node_presence.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/fault_point.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/io/blob_directories.h"
#include "core/records/records.h"

namespace ckptfs {
namespace {

using std::chrono::seconds;

std::string HostName() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

// Another one after every boot; empty if it cannot be read.
std::string BootId() {
  const auto file = OpenDescriptor("/proc/sys/kernel/random/boot_id", O_RDONLY);
  std::array<char, 64> text{};
  if (!file || read(file->get(), text.data(), text.size()) < 0) return "";
  const std::string_view line(text.data());
  return std::string(line.substr(0, line.find('\n')));
}

uint64_t DeviceOf(const std::string& directory) {
  struct stat info {};
  return !directory.empty() && stat(directory.c_str(), &info) == 0 ? info.st_dev : 0;
}

// The state of the daemon's lock, as this very kernel knows it.
PresenceState LookHere(const std::string& directory, const Digest& node, const NodePresence& said) {
  if (directory.empty() || said.boot.empty() || said.boot != BootId() ||
      said.device != DeviceOf(directory)) {
    return PresenceState::kUnknown;
  }
  return ClaimBlobDirectory(directory, node.Hex()) ? PresenceState::kGone : PresenceState::kWorks;
}

}  // namespace

struct PresenceSaid::Held {
  Held(PresenceSaid& of, std::string held) : said(of), name(std::move(held)) {}
  ~Held() {
    MutexLock lock(said.mutex_);
    said.names_.erase(said.names_.find(name));
  }
  PresenceSaid& said;
  const std::string name;
};

PresenceSaid::PresenceSaid(std::shared_ptr<Storage> storage, const std::string& directory,
                           std::chrono::milliseconds beat)
    : storage_(std::move(storage)),
      node_(RandomDigest()),
      beat_(beat),
      host_(HostName()),
      boot_(BootId()),
      device_(DeviceOf(directory)) {
  if (!directory.empty()) {
    auto lock = HoldBlobDirectory(directory, node_.Hex());
    if (lock) lock_ = *std::move(lock);
  }
  if (!lock_) boot_.clear();  // others on the same kernel cannot ask it then
  worker_.Start(Worker::kWhenWoken, [this] { return Turn(); });
}

PresenceSaid::~PresenceSaid() {
  worker_.Stop();
  {
    MutexLock lock(mutex_);
    moved_.NotifyAll();
  }
  Withdraw();
}

Result<std::shared_ptr<const void>> PresenceSaid::Hold(const std::string& name) {
  MutexLock lock(mutex_);
  names_.insert(name);
  const uint64_t mine = ++wanted_;
  worker_.Wake();
  while (said_ < mine && !worker_.stopping()) moved_.Wait(mutex_);
  if (last_ && !worker_.stopping())
    return std::shared_ptr<const void>(std::make_shared<Held>(*this, name));
  names_.erase(names_.find(name));
  if (last_) return Fail(ErrorCode::kIo, "the daemon is ending");
  return Fail(Error(last_.error()));
}

Status PresenceSaid::Say(const std::multiset<std::string>& names) {
  NodePresence presence{++beats_, host_, boot_, device_, {names.begin(), names.end()}};
  CKPT_ASSIGN_OR_RETURN(const auto writer, storage_->Create(PresenceName(node_)));
  const std::string text = RenderPresence(presence);
  CKPT_RETURN_IF_ERROR(writer->WriteAt(0, std::as_bytes(std::span(text))));
  FaultPoint();
  return writer->Close();
}

void PresenceSaid::Withdraw() {
  if (there_) (void)Caught([this] { return storage_->Remove(PresenceName(node_)); });
  there_ = false;
}

Worker::Time PresenceSaid::Turn() {
  std::multiset<std::string> names;
  uint64_t upto = 0;
  {
    MutexLock lock(mutex_);
    names = names_;
    upto = wanted_;
  }
  Status done;
  if (names.empty()) {
    Withdraw();
  } else {
    there_ = true;
    done = Caught([&] { return Say(names); });
  }
  MutexLock lock(mutex_);
  said_ = upto;
  last_ = done;
  moved_.NotifyAll();
  return Worker::Clock::now() + beat_;
}

PresenceState PresenceWatch::LookAtBeat(const Digest& node, const NodePresence& said, Time now) {
  MutexLock lock(mutex_);
  const auto [at, first] = seen_.try_emplace(node, Seen{said.beat, {}, now});
  Seen& seen = at->second;
  if (seen.beat != said.beat) seen = Seen{said.beat, {}, now, true};
  seen.same +=
      std::clamp<std::chrono::steady_clock::duration>(now - seen.last, seconds(0), kLongestLook);
  seen.last = now;
  if (seen.same >= gone_) return PresenceState::kGone;
  return seen.moved ? PresenceState::kWorks : PresenceState::kUnknown;
}

PresenceState PresenceWatch::Look(const std::string& directory, const Digest& node,
                                  const std::optional<NodePresence>& said, Time now) {
  if (!said) return PresenceState::kGone;
  const PresenceState here = LookHere(directory, node, *said);
  return here != PresenceState::kUnknown ? here : LookAtBeat(node, *said, now);
}

Result<std::optional<NodePresence>> ReadPresence(const Storage& storage, const Digest& node) {
  const auto text = ReadWhole(storage, PresenceName(node), kPreparedMaxBytes);
  if (!text && text.error().code == ErrorCode::kNotFound) return std::nullopt;
  if (!text) return Fail(Error(text.error()));
  auto said = ParsePresence(*text);
  return said ? *std::move(said) : NodePresence();
}

Result<std::map<Digest, NodePresence>> ReadPresences(const Storage& storage) {
  std::map<Digest, NodePresence> found;
  const auto entries = storage.List(kNodesFolder);
  if (!entries && entries.error().code == ErrorCode::kNotFound) return found;
  if (!entries) return Fail(Error(entries.error()));
  for (const RootEntry& entry : *entries) {
    const auto node = DigestNamed(entry.name);
    if (!node) continue;
    CKPT_ASSIGN_OR_RETURN(auto said, ReadPresence(storage, *node));
    if (said) found.emplace(*node, *std::move(said));  // else gone meanwhile
  }
  return found;
}

}  // namespace ckptfs
