// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/protector.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr int kNice = 10;  // the training goes first

void BeNice() { (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice); }

std::string TitleOf(const PreparedPart& part) { return StrCat(part.name.run, "/", part.step); }

// Keeps a rate: says after each piece until when it is ahead of it.
class Pace {
 public:
  explicit Pace(uint64_t rate) : rate_(rate) {}
  std::chrono::steady_clock::time_point Add(uint64_t bytes) {
    sent_ += bytes;
    if (rate_ == 0) return begin_;
    const double seconds = static_cast<double>(sent_) / static_cast<double>(rate_);
    return begin_ + std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::duration<double>(seconds));
  }
  uint64_t sent() const { return sent_; }
  std::chrono::nanoseconds time() const { return std::chrono::steady_clock::now() - begin_; }

 private:
  const uint64_t rate_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  uint64_t sent_ = 0;
};

}  // namespace

Protector::Protector(ProtectorOptions options) : options_(std::move(options)) {
  const auto failed = [this](const Error& error) {
    Say(StrCat("protecting snapshots: ", error.message));
  };
  copier_.Start(
      Worker::kWhenWoken, [this] { return CopyTurn(); }, failed);
  sender_.Start(
      Clock::now() + options_.turn, [this] { return SendTurn(); }, failed);
}

Protector::~Protector() {
  sender_.Ask();  // what is being sent ends
  copier_.Stop();
  sender_.Stop();
}

void Protector::Say(const std::string& line) const {
  if (options_.log) options_.log(line);
}

void Protector::Note(const std::string& run, std::string what) {
  MutexLock lock(mutex_);
  if (what.empty()) {
    notes_.erase(run);
  } else {
    notes_[run] = std::move(what);
  }
}

void Protector::Take(const AttemptName& name, uint64_t step, uint32_t world,
                     const std::map<uint32_t, ReceivedFile>& files) {
  Incoming older;  // its arenas are let go of outside of the lock
  MutexLock lock(mutex_);
  Incoming& slot = incoming_[name.run];
  if (slot.part.name != name) {
    older = std::exchange(slot, Incoming{{name, step, world, 0, {}}, {}});
    if (!older.files.empty()) ++passed_over_;
  }
  for (const auto& [rank, file] : files) slot.files[rank] = file;
  copier_.Wake();
}

// ---- to the shelf --------------------------------------------------------------

Worker::Time Protector::CopyTurn() {
  BeNice();
  Incoming next;
  {
    MutexLock lock(mutex_);
    if (incoming_.empty()) return Worker::kWhenWoken;
    next = std::move(incoming_.begin()->second);
    incoming_.erase(incoming_.begin());
  }
  const std::string title = TitleOf(next.part);
  auto copied = Caught([&] { return Copy(std::move(next)); });
  if (copied) {
    said_full_.clear();
    MakeReady(*std::move(copied));
    return Clock::now();
  }
  const std::string line = copied.error().message;
  {
    MutexLock lock(mutex_);
    ++full_;
  }
  if (std::exchange(said_full_, line) != line)
    Say(StrCat("snapshot ", title, " is not protected: ", line));
  return Clock::now();
}

Result<Protector::Generation> Protector::Copy(Incoming incoming) {
  Generation made{std::move(incoming.part), {}};
  made.part.mtime_ns = options_.time_of(made.part.name.run, made.part.name.job);
  made.since = Clock::now();
  Slots replaced;
  {
    MutexLock lock(mutex_);
    auto older = ready_.extract(made.part.name.run);
    // Other ranks of the same save are sent with these.
    if (!older.empty() && older.mapped().part.name == made.part.name) {
      made = std::move(older.mapped());
    } else if (!older.empty()) {
      ++passed_over_;
      replaced.insert(std::move(older));
    }
  }
  for (auto& [run, older] : replaced) LetGo(older);
  replaced.clear();
  for (auto& [number, file] : incoming.files) {
    PreparedPart part = made.part;
    part.ranks = {{number, file.bytes, file.chunks}};
    auto room = options_.shelf->Begin({part, {}, 0});
    Status done = room ? Status() : Fail(Error(room.error()));
    if (room) {
      auto to = (*room)->room().begin();
      for (const auto& span : file.rope) to = std::copy(span.begin(), span.end(), to);
      done = options_.shelf->Shelve(*std::move(room));
    }
    file = {};  // its arena is let go of
    if (!done && done.error().code != ErrorCode::kExists) {
      LetGo(made);
      return Fail(std::move(done).error());
    }
    PeerShelf::FilePtr shelved = options_.shelf->Find(part.Directory(), number);
    if (!shelved || shelved->rank() != part.ranks.front()) {
      LetGo(made);
      return Fail(ErrorCode::kDataLoss,
                  StrCat("rank ", number, ": its shelf does not hold the file that was saved"));
    }
    made.files.try_emplace(number, *options_.shelf, std::move(shelved));
    made.part.ranks.push_back(part.ranks.front());
  }
  return made;
}

void Protector::MakeReady(Generation generation) {
  MutexLock lock(mutex_);
  const std::string run = generation.part.name.run;
  ready_[run] = std::move(generation);
  sender_.Wake();
}

// ---- to the peers --------------------------------------------------------------

Worker::Time Protector::SendTurn() {
  BeNice();
  TakeReady();
  SpreadAll();
  MutexLock lock(mutex_);
  const bool idle =
      std::ranges::none_of(ready_, [&](const auto& one) { return !flight_.contains(one.first); });
  return idle ? Clock::now() + options_.turn : Clock::now();
}

void Protector::TakeReady() {
  MutexLock lock(mutex_);
  for (auto at = ready_.begin(); at != ready_.end();) {
    const auto next = std::next(at);
    const auto flies = flight_.find(at->first);
    if (flies == flight_.end()) {
      flight_.insert(ready_.extract(at));
    } else if (flies->second.part.name == at->second.part.name) {
      Join(flies->second, std::move(at->second));
      ready_.erase(at);
    }
    at = next;
  }
}

void Protector::SpreadAll() {
  for (Slots* slots : {&older_, &kept_, &flight_}) {  // of what is kept a holder may have gone
    for (auto& [run, generation] : *slots) {
      if (Spread(generation) && !generation.told) Tell(generation);
    }
  }
  for (auto at = flight_.begin(); at != flight_.end();) {
    at = GivesWay(at->second) ? flight_.erase(at) : std::next(at);
  }
  LetOlderGo();
  if (flight_.empty()) return;
  const auto attempts = options_.look();
  LetOlderGo();
  for (auto at = flight_.begin(); at != flight_.end();) {
    const auto next = std::next(at);
    if (Settle(at->second, attempts)) flight_.erase(at);
    at = next;
  }
}

// Other ranks of this daemon's have ended their parts of the same save.
void Protector::Join(Generation& generation, Generation more) {
  generation.files.merge(more.files);
  generation.part.ranks.insert(generation.part.ranks.end(), more.part.ranks.begin(),
                               more.part.ranks.end());
  generation.told = false;
}

// A save that nobody took makes room for a newer one.
bool Protector::GivesWay(Generation& flight) {
  const auto taken = [](const auto& one) { return !one.second.holders().empty(); };
  {
    MutexLock lock(mutex_);
    if (!ready_.contains(flight.part.name.run)) return false;
    if (std::any_of(flight.files.begin(), flight.files.end(), taken)) return false;
    ++passed_over_;
  }
  LetGo(flight);
  return true;
}

Protector::Place Protector::PlaceNow() const {
  const std::string self = options_.node.Hex();
  std::vector<PeerNode> nodes{{self, options_.failure_domain}};
  std::map<std::string, Digest> digests;
  std::map<std::string, std::string> domains;
  for (const PeerRecord& peer : options_.pool->present()) {
    nodes.push_back({peer.node.Hex(), peer.failure_domain});
    digests[nodes.back().name] = peer.node;
    domains[nodes.back().name] = peer.failure_domain;
  }
  Place place{options_.scheme.shape, {}};
  const auto groups = PlaceNodes(nodes, options_.scheme);
  for (const PeerGroup& group : groups ? *groups : std::vector<PeerGroup>()) {
    for (size_t member = 0; member < group.members.size(); ++member) {
      if (group.members[member].name != self) continue;
      place.shape = group.shape;
      for (const size_t holder : UnitHolders(group, member))
        if (holder != member) place.nodes.push_back(digests[group.members[holder].name]);
    }
  }
  // Copies are made on as many nodes as there are; a stripe needs all of its nodes.
  if (!groups && options_.scheme.shape.cuts()) place.shape = Fail(Error(groups.error()));
  // Where these have no room others do: of other failure domains first.
  for (const bool same : {false, true}) {
    for (const auto& [name, node] : digests) {
      const bool is_same = domains[name] == options_.failure_domain;
      if (is_same == same &&
          std::find(place.nodes.begin(), place.nodes.end(), node) == place.nodes.end())
        place.nodes.push_back(node);
    }
  }
  return place;
}

bool Protector::Spread(Generation& generation) {
  bool all = true;
  for (auto& [rank, file] : generation.files) {
    const Status spread = SpreadRank(generation, file);
    if (stopping()) return false;
    if (spread) continue;
    all = false;
    Note(generation.part.name.run, StrCat(TitleOf(generation.part), ": rank ", rank,
                                          " is not protected: ", spread.error().message));
  }
  return all;
}

std::set<Digest> Protector::PresentNodes() const {
  std::set<Digest> present;
  for (const PeerRecord& peer : options_.pool->present()) present.insert(peer.node);
  return present;
}

Status Protector::SpreadRank(Generation& generation, SpreadFile& file) {
  if (!file.shape() || !file.Missing(PresentNodes()).empty()) {
    const Place place = PlaceNow();
    if (!file.shape() && !place.shape) return Fail(Error(place.shape.error()));
    // Also anew, where nodes came or went before all units were sent.
    if (place.shape && file.MayBeCut() && !generation.told && *place.shape != file.shape()) {
      TakeBack(generation.part.Directory(), file);
      file.Cut(*place.shape);
    }
    CKPT_RETURN_IF_ERROR(SendMissing(file, place.nodes));
    generation.told = false;  // a new holder has to be told
  }
  return file.KeepUnit();
}

Status Protector::SendMissing(SpreadFile& file, const std::vector<Digest>& nodes) {
  std::string why;
  for (const Digest& node : nodes) {
    const std::set<uint32_t> missing = file.Missing(PresentNodes());
    if (missing.empty()) return {};
    if (file.holders().contains(node)) continue;
    const Status sent = SendUnit(file, *missing.begin(), node);
    if (!sent) why = StrCat("; ", sent.error().message);
    if (stopping()) return Fail(ErrorCode::kIo, "the daemon is ending");
  }
  const std::set<Digest> present = PresentNodes();
  const std::set<uint32_t> missing = file.Missing(present);
  if (missing.empty()) return {};
  return Fail(ErrorCode::kExhausted, StrCat(options_.scheme.Text(), " needs ", missing.size(),
                                            " more nodes; ", present.size(), " answer", why));
}

Status Protector::SendUnit(SpreadFile& file, uint32_t unit, const Digest& node) {
  Pace pace(options_.rate);
  const HeldFile::AskNode ask = [&](const Digest& of, const auto& question) {
    return options_.pool->Ask(of, question);
  };
  const Status sent =
      file.Send(unit, node, ask, [&](uint64_t bytes) { return sender_.Pause(pace.Add(bytes)); });
  if (pace.sent() != 0) options_.pool->Sent(node, pace.sent(), pace.time());
  return sent;
}

void Protector::Tell(Generation& generation) {
  const std::string directory = generation.part.Directory();
  for (auto& [rank, file] : generation.files) {
    for (const auto& [node, unit] : file.holders()) {
      const Status told = options_.pool->Ask(
          node, [&, r = rank, slot = file.shape()->SlotOf(unit)](PeerClient& client) {
            return client.Protect(directory, r, slot);
          });
      // It has let go of it, or is away: another one is looked for.
      if (!told) return file.Forget(Digest(node));
    }
  }
  for (auto& [rank, file] : generation.files) file.Protect();
  generation.told = true;
}

bool Protector::Settle(Generation& flight, const std::vector<MemoryAttempt>& attempts) {
  const std::string& run = flight.part.name.run;
  const std::string directory = flight.part.Directory();
  const auto mine = std::find_if(attempts.begin(), attempts.end(), [&](const MemoryAttempt& one) {
    return one.name.run == run && one.Directory() == directory;
  });
  if (mine != attempts.end() && mine->is_protected()) {
    {
      MutexLock lock(mutex_);
      ++protected_;
      last_protected_ = TitleOf(flight.part);
      notes_.erase(run);
    }
    Keep(std::move(flight));
    return true;
  }
  std::string why;
  for (const MemoryAttempt& other : attempts) {
    if (mine == attempts.end() || other.name.job != mine->name.job ||
        other.name.life != mine->name.life || !IsEarlier(*mine, other)) {
      continue;
    }
    // A rank that has a later save and not this one never comes.
    for (const auto& [rank, held] : other.ranks) {
      if (!mine->ranks.contains(rank)) why = StrCat("rank ", rank, " went on without it");
    }
  }
  if (Clock::now() - flight.since > options_.patience)
    why = "other nodes did not protect their parts";
  if (why.empty()) {
    if (flight.told && mine != attempts.end())
      Note(run, StrCat(TitleOf(flight.part), ": ", mine->Hindrance()));
    return false;
  }
  LetGo(flight);
  MutexLock lock(mutex_);
  ++passed_over_;
  notes_[run] = StrCat(TitleOf(flight.part), ": ", why);
  return true;
}

bool Protector::Shows(const Generation& generation) const {
  return !options_.shown || options_.shown(generation.part.name.run) == generation.part.Directory();
}

void Protector::Keep(Generation flight) {
  const std::string run = flight.part.name.run;
  auto before = kept_.extract(run);
  if (!before.empty()) {
    const auto older = older_.find(run);
    // One that was never shown itself goes, and what it was to replace stays.
    if (older != older_.end() && !Shows(before.mapped())) {
      LetGo(before.mapped());
    } else {
      if (older != older_.end()) LetGo(older->second);
      older_[run] = std::move(before.mapped());
    }
  }
  kept_[run] = std::move(flight);
  LetOlderGo();
}

void Protector::LetOlderGo() {
  for (auto at = older_.begin(); at != older_.end();) {
    const auto next = std::next(at);
    const auto kept = kept_.find(at->first);
    if (kept == kept_.end() || Shows(kept->second)) {
      LetGo(at->second);
      older_.erase(at);
    }
    at = next;
  }
}

void Protector::LetGo(Generation& generation) {
  const std::string directory = generation.part.Directory();
  for (auto& [rank, file] : generation.files) {
    file.LetGo();
    TakeBack(directory, file);
  }
}

void Protector::TakeBack(const std::string& directory, const SpreadFile& file) {
  for (const auto& [node, unit] : file.holders()) {
    (void)options_.pool->Ask(node, [&, slot = file.shape()->SlotOf(unit)](PeerClient& client) {
      return client.LetGo(directory, file.rank(), slot);
    });
  }
}

ProtectorStatus Protector::status() const {
  MutexLock lock(mutex_);
  ProtectorStatus status{.scheme = options_.scheme.Text(),
                         .held = protected_,
                         .passed_over = passed_over_,
                         .full = full_,
                         .last_protected = last_protected_,
                         .steps = {}};
  for (const auto& [run, note] : notes_) status.steps.push_back(note);
  return status;
}

}  // namespace ckptfs
