// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <system_error>
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
constexpr int kAsks = 5;  // while daemons show different steps
constexpr std::chrono::seconds kBetweenAsks{1};
constexpr uint64_t kMostBack = 1023;  // attempts before the one in memory that are known by name

struct RecoverFlags {
  std::string run;
  std::string store;
  bool json = false;
};

// The steps that daemons can show, and how many daemons answered.
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
  try {
    for (size_t i = 1; i < std::min(peers.size(), kAskers); ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // Those that did start ask all.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return survivors;
}

bool Differ(const Survivors& survivors) {
  return std::any_of(survivors.shown.begin(), survivors.shown.end(),
                     [&](const auto& shown) { return shown != survivors.shown.front(); });
}

// Daemons show a new step a moment apart.
Result<Survivors> AskUntilTheyAgree(Store& store, const std::string& run) {
  for (int ask = 1;; ++ask) {
    CKPT_ASSIGN_OR_RETURN(Survivors survivors, AskAll(store, run));
    if (!Differ(survivors)) return survivors;
    if (ask == kAsks) {
      fmt::print(stderr,
                 "ckptfs: daemons show different steps from memory; one that all show is "
                 "taken\n");
      return survivors;
    }
    std::this_thread::sleep_for(kBetweenAsks);
  }
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

// True if files lie where that attempt, or one before it of the same life, put those of its step.
bool IsUpTo(std::string_view directory, AttemptName attempt, uint64_t step) {
  for (uint64_t back = 0; back <= kMostBack; ++back) {
    if (PreparedPart{attempt, step, 0, 0, {}}.Directory() == directory) return true;
    if (attempt.attempt == 0) return false;
    --attempt.attempt;
  }
  return false;
}

// True if the store's step was saved after the one in memory; the same save is not.  A durable
// step's time may be that of its end: where its attempt is known, that counts.
Result<bool> IsNewer(Store& store, const StepRecord& record, const ShownMemoryStep& memory) {
  CKPT_ASSIGN_OR_RETURN(const auto step, store.Load(record));
  const std::vector<Blob>& blobs = step->model.blobs;
  if (!blobs.empty()) {
    const std::string there = ParentPath(blobs.front().path);
    if (there == memory.directory || IsUpTo(there, memory.name, record.iteration)) return false;
  }
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
  CKPT_ASSIGN_OR_RETURN(const Survivors survivors, AskUntilTheyAgree(*store, options.run));
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
    const auto is_newer = IsNewer(*store, *latest, *memory);
    if (!is_newer) {
      fmt::print(stderr, "ckptfs: the newest durable step is passed over: {}\n",
                 Printable(is_newer.error().message));
    }
    newer = is_newer.value_or(false);
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
