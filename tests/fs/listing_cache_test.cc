// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/listing_cache.h"

#include <gtest/gtest.h>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

Node DirectoryOf(uint64_t inode) {
  Node node;
  node.inode = InodeNumber{inode};
  return node;
}

std::shared_ptr<const Listing> ListingOf(size_t names) {
  auto listing = std::make_shared<Listing>();
  for (size_t i = 0; i < names; ++i) {
    auto child = std::make_shared<Node>();
    child->path = StrCat("/run/r/step/s/view/dp", names, "/rank", i);
    listing->children.push_back(std::move(child));
  }
  return listing;
}

constexpr uint64_t kBytes = 1 << 20;

TEST(ListingCacheTest, WhatIsKeptIsBoundedByBytes) {
  ListingCache cache(kBytes);
  for (uint64_t i = 2; i < 200; ++i) {
    cache.Insert(DirectoryOf(i), ListingOf(100));
    EXPECT_LE(cache.bytes(), kBytes);
  }
  EXPECT_GT(cache.bytes(), kBytes / 2);
  EXPECT_TRUE(cache.Find(DirectoryOf(199)));
  EXPECT_FALSE(cache.Find(DirectoryOf(2)));
  EXPECT_GE(ListingOf(100)->Bytes(), 100 * (sizeof(Node) + 30));
}

TEST(ListingCacheTest, ALargeListingGoesWhenItWasReadToItsEnd) {
  ListingCache cache(kBytes);
  cache.Insert(DirectoryOf(2), ListingOf(10));
  cache.Insert(DirectoryOf(3), ListingOf(1000));
  EXPECT_FALSE(cache.Finished(DirectoryOf(2)));
  EXPECT_TRUE(cache.Find(DirectoryOf(2)));
  EXPECT_TRUE(cache.Finished(DirectoryOf(3)));
  EXPECT_FALSE(cache.Find(DirectoryOf(3)));
  EXPECT_FALSE(cache.Finished(DirectoryOf(3)));
  EXPECT_LT(cache.bytes(), kBytes / 32);
}

TEST(ListingCacheTest, OneThatIsLargerThanTheBoundStaysAloneWhileItIsRead) {
  ListingCache cache(kBytes);
  cache.Insert(DirectoryOf(2), ListingOf(10));
  cache.Insert(DirectoryOf(3), ListingOf(20000));
  EXPECT_TRUE(cache.Find(DirectoryOf(3)));
  EXPECT_FALSE(cache.Find(DirectoryOf(2)));
  cache.Insert(DirectoryOf(4), ListingOf(10));
  EXPECT_FALSE(cache.Find(DirectoryOf(3)));
  EXPECT_LE(cache.bytes(), kBytes);
}

}  // namespace
}  // namespace ckptfs
