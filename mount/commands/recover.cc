// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/peer/peer_client.h"
#include "core/peer/peer_records.h"
#include "core/peer/tcp_transport.h"
#include "core/records/records.h"
#include "mount/commands/command_set.h"
#include "mount/control/step_json.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

constexpr size_t kAskers = 16;
constexpr std::chrono::seconds kPeerPatience{3};

struct RecoverFlags {
  std::string run;
  std::string store;
  bool json = false;
};

// What the daemons that answer can show, and how many they are.
struct Survivors {
  std::vector<std::vector<ShownMemoryStep>> shown;
  std::vector<std::string> away;  // why others are not asked
};

Result<std::vector<ShownMemoryStep>> AskOne(const PeerRecord& peer, const PeerIdentity& self,
                                            const std::string& run) {
  TcpTransport transport({.from = "", .patience = kPeerPatience});
  CKPT_ASSIGN_OR_RETURN(const auto client,
                        PeerClient::Connect(transport, peer.address, peer.node, self));
  return client->Show(run);
}

Result<Survivors> AskAll(Store& store, const std::string& run) {
  Survivors survivors;
  CKPT_ASSIGN_OR_RETURN(const auto peers,
                        ReadPeers(*store.storage(), {}, [](std::string_view line) {
                          fmt::print(stderr, "ckptfs: {}\n", Printable(line));
                        }));
  if (peers.empty()) return survivors;
  CKPT_ASSIGN_OR_RETURN(const std::string format,
                        ReadWhole(*store.storage(), "format", kRecordMaxBytes));
  CKPT_ASSIGN_OR_RETURN(const PeerKey key, StorePeerKey(*store.storage()));
  const PeerIdentity self{key, RandomDigest(), DigestOf(format)};
  Mutex mutex;
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < peers.size(); i = next++) {
      auto shown = AskOne(peers[i], self, run);
      MutexLock lock(mutex);
      if (shown) {
        survivors.shown.push_back(*std::move(shown));
      } else {
        survivors.away.push_back(
            StrCat(peers[i].host, " (", peers[i].address, "): ", shown.error().message));
      }
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < std::min(peers.size(), kAskers); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return survivors;
}

// The newest step that every daemon which answers can show.
std::optional<ShownMemoryStep> Common(const Survivors& survivors) {
  std::optional<ShownMemoryStep> newest;
  if (survivors.shown.empty()) return newest;
  for (const ShownMemoryStep& step : survivors.shown.front()) {
    const bool all =
        std::all_of(survivors.shown.begin(), survivors.shown.end(), [&](const auto& other) {
          return std::find(other.begin(), other.end(), step) != other.end();
        });
    if (all && (!newest || newest->mtime_ns < step.mtime_ns)) newest = step;
  }
  return newest;
}

// True if the store's step was saved after the one in memory; the same save is not.
Result<bool> IsNewer(Store& store, const StepRecord& record, const ShownMemoryStep& memory) {
  CKPT_ASSIGN_OR_RETURN(const auto step, store.Load(record));
  const std::vector<Blob>& blobs = step->model.blobs;
  if (!blobs.empty() && ParentPath(blobs.front().path) == memory.directory) return false;
  return record.mtime_ns >= memory.mtime_ns;
}

void Print(const RecoverFlags& options, const std::string& place, const std::string& id,
           uint64_t step) {
  const std::string where = StrCat(options.run, place == "memory" ? "/memory/" : "/", id);
  if (options.json) {
    PrintJson(
        {{"run", options.run}, {"place", place}, {"id", id}, {"step", where}, {"iteration", step}});
  } else {
    fmt::print("{}\n", Printable(where));
  }
}

Status RunRecover(const RecoverFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  CKPT_ASSIGN_OR_RETURN(const Survivors survivors, AskAll(*store, options.run));
  for (const std::string& line : survivors.away) {
    fmt::print(stderr, "ckptfs: does not answer: {}\n", Printable(line));
  }
  const auto memory = Common(survivors);
  const auto latest = store->Resolve(options.run, "latest");
  if (!latest && latest.error().code != ErrorCode::kNotFound && !memory) {
    return Fail(Error(latest.error()));
  }
  bool newer = latest.has_value() && !memory;
  if (latest && memory) {
    CKPT_ASSIGN_OR_RETURN(newer, IsNewer(*store, *latest, *memory));
  }
  if (newer) {
    Print(options, "store", latest->id, latest->iteration);
  } else if (memory) {
    Print(options, "memory", memory->id, memory->step);
  } else {
    return Fail(ErrorCode::kNotFound,
                StrCat("run '", options.run, "' has no step, durable or in memory"));
  }
  return {};
}

}  // namespace

void AddRecoverCommand(CommandSet& commands) {
  auto options = std::make_shared<RecoverFlags>();
  Command& command =
      commands.Add("recover", "Print the newest step that can be loaded: in memory, or durable");
  command.Add("RUN", options->run, "The run").Required().Offers(kOfferRuns);
  AddStoreOption(command, options->store);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunRecover(*options); };
}

}  // namespace ckptfs
