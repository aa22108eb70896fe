// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/peer_steps.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <string_view>
#include <utility>

#include "core/base/strings.h"
#include "core/peer/peer_pool.h"
#include "core/peer/peer_root.h"
#include "core/peer/tcp_transport.h"
#include "core/records/records.h"
#include "mount/daemon/memory_step.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

void PrintPeerLine(std::string_view line) { fmt::print(stderr, "ckptfs: {}\n", Printable(line)); }

// Why the run has no step in memory.
Error NoStep(const std::string& run, const std::vector<MemoryAttempt>& attempts) {
  std::string why = "no daemon that answers holds any of it";
  for (const MemoryAttempt& attempt : attempts) {
    if (attempt.name.run == run) why = StrCat("step ", attempt.step, ": ", attempt.Hindrance());
  }
  return {ErrorCode::kNotFound, StrCat("run '", run, "' has no step in memory: ", why)};
}

}  // namespace

Result<KnownPeers> FindPeers(Store& store) {
  KnownPeers known;
  CKPT_ASSIGN_OR_RETURN(known.peers, ReadPeers(*store.storage(), {}, PrintPeerLine));
  if (known.peers.empty()) return known;
  CKPT_ASSIGN_OR_RETURN(const std::string format,
                        ReadWhole(*store.storage(), "format", kRecordMaxBytes));
  CKPT_ASSIGN_OR_RETURN(const PeerKey key, StorePeerKey(*store.storage()));
  known.self = {key, RandomDigest(), DigestOf(format)};
  return known;
}

Result<PeerStep> LoadPeerStep(Store& store, const std::string& run, const std::string& id) {
  CKPT_ASSIGN_OR_RETURN(const KnownPeers known, FindPeers(store));
  const auto pool = std::make_shared<PeerPool>(
      std::make_shared<TcpTransport>(TcpTransport::Options{.from = "", .patience = kPeerPatience}),
      known.self, PrintPeerLine);
  pool->Set(known.peers);
  const std::vector<MemoryAttempt> attempts = AttemptsOn(pool->ListAll());
  const MemoryAttempt* const newest = NewestProtected(attempts, run);
  if (newest == nullptr) return Fail(NoStep(run, attempts));
  const PeerShelf none(0);
  CKPT_ASSIGN_OR_RETURN(
      const auto root,
      PeerRoot::Open(*newest, {&none, pool, RootBelow(store.storage(), "blobs"), PrintPeerLine}));
  // Nobody is told: this process holds the store's files open while it reads them.
  const KeptFiles::Say say = [](const std::string&) {
    return Result<std::shared_ptr<const void>>(nullptr);
  };
  PeerStep found;
  found.catalogue = std::make_unique<StepCatalogue>(store);
  CKPT_ASSIGN_OR_RETURN(MemoryStep step, StepOfMemory(root, store, say));
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, found.catalogue->ShowMemory(std::move(step)));
  if (!id.empty() && record.id != id) {
    return Fail(ErrorCode::kNotFound,
                StrCat("run '", run, "' has step ", record.id, " in memory, not ", id));
  }
  CKPT_ASSIGN_OR_RETURN(found.step, found.catalogue->Load(record));
  return found;
}

}  // namespace ckptfs
